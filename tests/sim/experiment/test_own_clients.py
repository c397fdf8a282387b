"""Experiments whose clients are real `Client` objects: `[clients]` of the file, from the rehearsal to the results."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.sim.engines.clients.sites import HERE, N_CLASSES, samples_of
from tests.sim.experiment.test_rehearsal import refused
from umbel.aggregation.messages import RunStatus
from umbel.client import TorchClient
from umbel.sim import simulate
from umbel.sim.engines.clients.app import ClientShare
from umbel.sim.engines.work import EngineError
from umbel.sim.experiment.file import TrialSpec, experiment_of
from umbel.sim.experiment.trials import Watcher
from umbel.sim.federation.rows import Row


def table(app: str = "make_client", section: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """An experiment of six clients that bring their own data, with other sections; None takes one out."""
    made: dict[str, Any] = {
        "name": "own",
        "clients": {"app": f"{HERE}:{app}", "count": 6, **(section or {})},
        "engine": {"name": "sequential"},
        "rounds": {"count": 3, "target": 4, "minimum": 2, "window_s": 600.0},
        "training": {"local_epochs": 2, "batch_size": 3, "learning_rate": 0.1},
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


DEALT: dict[str, Any] = {
    "clients": {"app": f"{HERE}:make_client_of_share"},
    "data": {"name": "digits", "train_limit": 200, "test_limit": 50},
    "partition": {"scheme": "iid", "clients": 8, "holdout": 0.2},
}


class _StopsAfter(Watcher):
    def __init__(self, n_rows: int) -> None:
        self._n_left = n_rows

    def row(self, trial: TrialSpec, row: Row) -> None:
        self._n_left -= 1
        if not self._n_left:
            raise KeyboardInterrupt


def rows_of(described: dict[str, Any], out: Path | None = None) -> tuple[Row, ...]:
    (trial,) = simulate(described, out).trials
    assert trial.status is RunStatus.FINISHED, trial.reason
    return trial.rows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"name": "mlp"}}, "bring their own model; leave .model. out"),
        ({"engine": {"name": "threads"}}, 'the engine "threads" cannot run .clients.: clients draw from the process'),
        ({"engine": {"name": "batched"}}, 'the engine "batched" cannot run .clients.: it cannot prove'),
        ({"engine": {"device": "cuda"}}, "choose their own device"),
        ({"partition": {"scheme": "iid", "clients": 3}}, "which this file does not have"),
        (
            {**DEALT, "clients": {"app": f"{HERE}:make_client_of_share", "count": 8}},
            "clients.count is only for clients",
        ),
        ({"clients": {"app": f"{HERE}:make_client"}}, "clients.count is missing"),
        ({"clients": {"app": "make_client", "count": 3}}, "app must look like module:function"),
        ({"clients": None}, "data. is missing: name the data to simulate with, or .clients. that bring"),
        (
            {"fleet": {"malicious": {"share": 0.1, "kinds": ["label-flip"]}}},
            "need labels that the simulator can change",
        ),
        (
            {"clients": {"app": "a:b", "count": 3, "test": "a:c", "test_clients": 2}},
            "`test` measures new models, so `test_clients` has no effect",
        ),
        ({"clients": {"app": "a:b", "count": 3, "arguments": {"of": 2}}}, "arguments cannot have 'of'"),
    ],
)
def test_what_would_have_no_effect_is_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        experiment_of(table(**changes))


@pytest.mark.parametrize(
    ("app", "clients", "words"),
    [
        ("make_unequal", {}, "the model of client 5 is not the model of client 0: tensor '1.bias'"),
        ("make_without_arguments", {}, "write it as `def make_client"),
        ("make_broken", {}, "could not make client 0: KeyError"),
        ("make_client", {"test": f"{HERE}:A_NUMBER"}, "is a int; name a Client"),
        ("make_client", {"arguments": {"depth": 3}}, "unexpected keyword argument 'depth'"),
    ],
)
def test_errors_of_an_app_are_found_before_the_first_round(app: str, clients: dict[str, Any], words: str) -> None:
    refused(table(app, clients), EngineError, words)


def test_an_error_of_an_app_names_its_point_of_the_sweep() -> None:
    sweep = {"clients.app": [f"{HERE}:make_client", f"{HERE}:make_broken"]}
    refused(table(sweep=sweep), ValueError, r"KeyError: 'ward 7'.*\(with app=.*make_broken\)")


def test_the_clients_measure_and_their_metrics_are_in_the_rows() -> None:
    rows = rows_of(table(training={"local_epochs": 2, "batch_size": 3, "learning_rate": 0.1, "evaluate": True}))
    assert [row.round for row in rows] == [1, 2, 3]
    for before, row in zip((None, *rows), rows, strict=False):
        assert row.accuracy == row.test_metrics["accuracy"]
        assert row.loss == row.test_metrics["loss"]
        assert row.train_metrics.keys() == {"accuracy", "loss"}
        assert row.evaluation.keys() == {"accuracy", "loss"}
        assert before is None or before.test_metrics != row.test_metrics


def test_how_exactly_the_clients_have_trained_is_in_the_rows_and_changes_no_model() -> None:
    """Twice as many local steps minimize the local objective further."""
    asked = {"local_epochs": 2, "batch_size": 20, "learning_rate": 0.1, "proximal_mu": 0.5}
    (plain, *_), (some, *_), (more, *_) = (
        rows_of(table("make_smooth", rounds={"count": 1, "target": 4, "minimum": 2}, training={**asked, **changes}))
        for changes in ({}, {"inexactness": True}, {"inexactness": True, "local_epochs": 20})
    )
    assert some.train_metrics.keys() == {*plain.train_metrics, "gamma"}
    assert some.model_sha256 == plain.model_sha256
    assert 0 < more.train_metrics["gamma"] < some.train_metrics["gamma"] < 1


def test_all_clients_measure_or_some_that_the_seed_draws() -> None:
    """With every client in the cohort, the evaluation before the next training is that of all clients."""
    everyone = {"count": 3, "target": 6, "over_selection": 1.0, "window_s": 600.0}
    asked = {"local_epochs": 1, "batch_size": 3, "learning_rate": 0.1, "evaluate": True}
    rows = rows_of(table(rounds=everyone, training=asked))
    assert rows[0].test_metrics == pytest.approx(rows[1].evaluation)
    some = rows_of(table(section={"test_clients": 2}, rounds=everyone, training=asked))
    assert some[0].model_sha256 == rows[0].model_sha256
    assert some[0].test_metrics != rows[0].test_metrics


def test_a_tester_measures_instead_and_its_metrics_are_in_the_rows() -> None:
    rows = rows_of(table(section={"test": f"{HERE}:make_tester"}))
    assert [row.test_metrics for row in rows] == [{"accuracy": 0.25, "auc": 0.5}] * 3
    assert {row.loss for row in rows} == {None}


def test_a_tester_that_measures_nothing_is_named() -> None:
    with pytest.raises(EngineError, match=r"evaluate of the client of .* returned None"):
        simulate(table(section={"test": f"{HERE}:make_mute_tester"}))


def test_rounds_of_evaluation_ask_the_clients() -> None:
    rows = rows_of(table(evaluation={"every": 1, "clients": 2}))
    assert {row.task for row in rows} == {"training", "evaluation"}
    assert all(row.evaluation.keys() == {"accuracy", "loss"} for row in rows if row.task == "evaluation")


def make_ward(number: int, of: int, data: ClientShare) -> TorchClient:
    return TorchClient(nn.Linear(4, 2), "classes", data.train, data.holdout, device="cpu")


def test_each_natural_holder_measures_the_last_model_on_what_it_holds_back() -> None:
    """The classes of the third ward are turned, and it takes no part in the first run."""
    described = table(
        "make_ward",
        data={"name": "tests.sim.results.test_results:wards"},
        partition={"scheme": "natural", "only": ["east", "north"]},
        clients={"app": f"{__name__}:make_ward"},
        rounds={"count": 20, "target": 2, "over_selection": 1.0},
        training={"local_epochs": 1, "learning_rate": 0.5},
    )
    (two,) = simulate(described).trials
    assert list(two.groups) == ["east", "north"]
    assert all(scores["accuracy"] > 0.7 for scores in two.groups.values())
    weighted = (4 * two.groups["east"]["accuracy"] + 6 * two.groups["north"]["accuracy"]) / 10
    assert two.rows[-1].accuracy == pytest.approx(weighted)
    (turned,) = simulate({**described, "partition": {"scheme": "natural"}, "rounds": {"count": 1, "target": 3}}).trials
    assert list(turned.groups) == ["east", "north", "turned"]


@pytest.mark.slow
def test_clients_get_the_share_that_the_partition_deals_on_both_engines() -> None:
    alone = rows_of(table(section=None, **DEALT))
    workers = rows_of(table(section=None, **DEALT, engine={"name": "processes", "workers": 2}))
    assert [row.model_sha256 for row in alone] == [row.model_sha256 for row in workers]
    assert [row.test_metrics for row in alone] == [row.test_metrics for row in workers]


def test_auto_says_which_engine_it_took() -> None:
    (trial,) = simulate(table(engine={"name": "auto"})).trials
    assert trial.engine == "sequential"
    assert trial.model_sha256 == simulate(table()).trials[0].model_sha256


def test_a_resumed_experiment_ends_in_the_same_model(tmp_path: Path) -> None:
    whole = rows_of(table(), tmp_path / "whole")
    out = tmp_path / "cut"
    stopped = _StopsAfter(2)
    with pytest.raises(KeyboardInterrupt):
        simulate(table(), out, watcher=stopped)
    assert [row.model_sha256 for row in rows_of(table(), out)] == [row.model_sha256 for row in whole]
    lines = (out / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["test_metrics"] for line in lines] == [row.test_metrics for row in whole]


@pytest.mark.parametrize("weighting", ["samples", "proportional"])
def test_updates_are_taken_one_by_one_or_together_with_the_same_result(weighting: str) -> None:
    """Measured updates are held until the round is over; others are added up when they are there."""
    rounds = {"count": 3, "target": 4, "minimum": 2, "window_s": 600.0, "weighting": weighting}
    one_by_one = rows_of(table("make_remembering", rounds=rounds))
    together = rows_of(table("make_remembering", rounds=rounds, measure={"updates": True}))
    assert [row.model_sha256 for row in one_by_one] == [row.model_sha256 for row in together]
    assert all(row.update_norm for row in together)


KEEPING = {"count": 4, "target": 2, "minimum": 1, "window_s": 600.0}


@pytest.mark.slow
def test_clients_keep_their_state_and_private_tensors_across_rounds_on_every_engine() -> None:
    """Each round's mean of the counts follows from the records of which clients took part in which rounds."""
    described = table("make_remembering", {"alive": 1}, rounds=KEEPING, measure={"clients": True})
    rows = rows_of(described)
    seen = dict[str, list[int]]()
    for row in rows:
        took_part = [one["client"] for one in row.clients if one["fate"] == "accepted"]
        for name in took_part:
            seen.setdefault(name, []).append(row.round)
        assert row.train_metrics["n"] == pytest.approx(sum(len(seen[name]) for name in took_part) / len(took_part))
        assert row.train_metrics["own"] == pytest.approx(sum(sum(seen[name]) for name in took_part) / len(took_part))
    assert max(map(len, seen.values())) > 1, "a client took part twice"
    workers = rows_of({**described, "engine": {"name": "processes", "workers": 2}})
    assert [row.model_sha256 for row in workers] == [row.model_sha256 for row in rows]
    assert [row.train_metrics for row in workers] == [row.train_metrics for row in rows]


def test_a_resumed_experiment_has_the_states_of_its_clients(tmp_path: Path) -> None:
    described = table("make_remembering", rounds=KEEPING)
    whole = rows_of(described)
    with pytest.raises(KeyboardInterrupt):
        simulate(described, tmp_path, watcher=_StopsAfter(3))
    resumed = rows_of(described, tmp_path)
    assert [row.train_metrics for row in resumed] == [row.train_metrics for row in whole]
    assert [row.test_metrics for row in resumed] == [row.test_metrics for row in whole]


def test_a_client_with_less_time_than_its_own_steps_need_sends_partial_work() -> None:
    """It does eight steps an epoch, whatever the plan's batch size: the window is played again with that number."""
    slow = {"speed": {"step_s": 1.0, "spread": 0.0, "jitter": 0.0}}
    few = {"count": 1, "target": 4, "window_s": 30.0, "minimum": 2}
    (row,) = rows_of(table("make_careless", fleet=slow, rounds=few, training={"local_epochs": 20, "batch_size": 32}))
    assert row.partial == row.reported
    assert row.steps_asked == 80  # as many as the clients plan, not the 20 of their 9 samples in batches of 32


def test_counts_of_clients_are_added_up_in_the_rows_under_masks_as_without() -> None:
    """Every client is in every round, so that both kinds of rounds count the same clients."""
    rounds = {"count": 1, "target": 6, "minimum": 6, "over_selection": 1.0, "window_s": 600.0}
    described = table("make_counting", rounds=rounds, training={"local_epochs": 1, "evaluate": True})
    lengths = {"confusion": N_CLASSES**2}
    section = {"counts": lengths, "evaluation_counts": lengths}
    (plain,) = rows_of(described)
    masked, last = rows_of({**described, "secure_aggregation": section, "codec": {"name": "integer"}})
    assert sum(plain.counts["confusion"]) == sum(len(samples_of(number)) for number in range(6))
    assert sum(plain.evaluation_counts["confusion"]) == sum(len(samples_of(number + 6)) for number in range(6))
    assert plain.evaluation["confusion.accuracy"] == pytest.approx(plain.evaluation["accuracy"])
    assert plain.train_metrics["confusion.sensitivity"] > 0
    assert "confusion.accuracy" in plain.test_metrics
    assert (masked.counts, masked.evaluation_counts) == (plain.counts, plain.evaluation_counts)
    figures = {name for name in plain.evaluation if name.startswith("confusion.")}
    assert {name: masked.evaluation[name] for name in figures} == {name: plain.evaluation[name] for name in figures}
    assert (last.task, last.counts) == ("evaluation", {}), "all clients measure the last model"
    assert {name: last.evaluation[name] for name in figures} == {name: masked.test_metrics[name] for name in figures}


def test_a_client_is_asked_only_while_its_device_is_online(tmp_path: Path) -> None:
    """As a device that is asleep, uncharged or on a metered network does not check in."""
    periods = [*((number, 0, 90_000) for number in range(4)), (4, 90_000, 100_000), (5, 90_000, 100_000)]
    lines = ["device,from_s,until_s", *(f"d{number},{begins},{ends}" for number, begins, ends in periods)]
    (tmp_path / "online.csv").write_text("\n".join(lines) + "\n")
    fleet = {"presence": {"file": "online.csv"}}
    described = table(fleet=fleet, measure={"clients": True}, rounds={"count": 4, "target": 4, "minimum": 4})
    (trial,) = simulate(experiment_of(described, folder=tmp_path)).trials
    online = [f"client-{number:07}" for number in range(4)]
    assert [row.round for row in trial.rows] == [1, 2, 3, 4]
    assert [[one["client"] for one in row.clients] for row in trial.rows] == [online] * 4
