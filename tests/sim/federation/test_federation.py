"""A simulated run goes the way of the coordinator's: its machine, its sums, its endings, in virtual time."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sim.federation.worlds import attempts_of, hashes, table
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import RoundPlan, Task, Weighting
from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.types import ClientId, RunId
from umbel.sim import simulate
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.memory import Memory
from umbel.sim.federation.possible import SimulationError
from umbel.sim.federation.uplink import PlainUplink


def test_rounds_are_committed_until_the_file_has_enough() -> None:
    ended = attempts_of(table())
    assert [one.record.round for one in ended] == [1, 2, 3, 4]
    assert all(one.record.committed and one.record.reported == 6 for one in ended)
    assert ended[-1].standing.status is RunStatus.FINISHED
    assert ended[-1].record.model_version == 4


def test_the_same_seed_gives_the_same_records_and_models() -> None:
    first, second = attempts_of(table()), attempts_of(table())
    assert [one.record for one in first] == [one.record for one in second]
    assert first[-1].model.file == second[-1].model.file


ONE_FOR_ALL = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_a_module_that_is_named_itself_starts_every_run_as_it_is() -> None:
    before = {name: value.clone() for name, value in ONE_FOR_ALL.state_dict().items()}
    described = table(rounds={"count": 1}) | {"model": {"name": f"{__name__}:ONE_FOR_ALL"}}
    both = simulate({**described, "seeds": [0, 1]}).trials
    assert both[1].model_sha256 == simulate({**described, "seeds": [1]}).trials[0].model_sha256
    assert all(torch.equal(value, before[name]) for name, value in ONE_FOR_ALL.state_dict().items())


def test_another_seed_is_another_run() -> None:
    assert hashes(table(seeds=[1])) != hashes(table(seeds=[2]))


@pytest.mark.parametrize("engine", ["sequential", "threads"])
def test_engines_agree_within_rounding(engine: str) -> None:
    ours, theirs = attempts_of(table()), attempts_of(table(engine={"name": engine}))
    assert [one.record.selected for one in ours] == [one.record.selected for one in theirs]
    for name, values in ours[-1].model.master.items():
        torch.testing.assert_close(values, theirs[-1].model.master[name], rtol=0, atol=1e-6)


def test_threads_give_the_bits_of_the_plain_loop() -> None:
    assert hashes(table(engine={"name": "sequential"})) == hashes(table(engine={"name": "threads"}))


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "integer", "step": 0.5},
        {"name": "eden", "bits": 2},
        {"name": "topk", "share": 0.1, "error_feedback": True},
        {"name": "lowrank", "rank": 2},
    ],
    ids=lambda codec: codec["name"],
)
def test_updates_are_written_as_the_run_says(codec: dict[str, Any]) -> None:
    plain, coded = attempts_of(table()), attempts_of(table(codec=codec))
    assert sum(one.record.bytes_up for one in coded) < sum(one.record.bytes_up for one in plain)
    assert coded[-1].record.codec
    assert all(one.record.committed for one in coded)
    assert coded[-1].model.file != plain[-1].model.file


def test_what_error_feedback_leaves_is_kept_for_the_next_round_alone() -> None:
    """It counts there and nowhere else, and takes as much memory as a model for each client."""
    trial = experiment_of(table(codec={"name": "topk", "share": 0.1, "error_feedback": True})).trials[0]
    made = make_world(trial, Path(), None)
    federation = Federation(made.world, beginning(trial.run, made.model), made.model)
    for ended in federation.attempts():
        asked = {one.client for one in ended.record.clients}
        assert federation.memory.left.keys() <= asked
        assert len(federation.memory.left) == ended.record.reported
        assert {left.version for left in federation.memory.left.values()} == {ended.record.round - 1}


PLAN = RoundPlan(RunId("r"), 1, 1, 3, 1, 1.0, 10.0, Weighting.SAMPLES, 100, 64.0, seed=1)
LAYOUT = Layout.of_state({"w": torch.zeros(5, 7)})
VALUES = torch.randn(3, 35, generator=torch.Generator().manual_seed(0)) * 10


def added(values: Tensor) -> PlainUplink:
    """A float32 round of the clients a, b and c."""
    names = [ClientId(name) for name in "abc"]
    uplink = PlainUplink(PLAN, LAYOUT, {name: i for i, name in enumerate(names)}, 0, Memory())
    uplink.add(names, values, [], [3, 1, 50])
    return uplink


def test_a_float32_round_is_the_sum_that_clients_one_by_one_would_make() -> None:
    """The integers of a whole group at once, against each client's update written and read."""
    uplink, codec = added(VALUES), codec_for(PLAN.codec, PLAN.grid, LAYOUT)
    total = codec.new_sum()
    for i, weight in enumerate([3, 1, 50]):
        update = b"".join(codec.encode(lambda i=i: iter([VALUES[i]]), i))  # type: ignore[misc]
        total.add(codec.integers(update[: codec.header_bytes], [update[codec.header_bytes :]], i), weight)
    assert torch.equal(uplink.total.sums, total.sums)
    assert uplink.total.total_weight == total.total_weight == 54


@pytest.mark.parametrize("value", [64.5, -64.5, math.inf, -math.inf, math.nan])
def test_a_float32_update_with_one_value_off_the_grid_does_not_count(value: float) -> None:
    values = VALUES.clone()
    values[1, 30] = value
    uplink = added(values)
    assert uplink.refused.keys() == {"b"}
    assert uplink.sizes.keys() == {"a", "c"}
    assert uplink.total.total_weight == 53


def test_an_update_that_diverges_is_declined_and_another_takes_its_place() -> None:
    """One client's update leaves the grid: it does not count, and the next in time does."""
    described = table(fleet={"corrupt": {"share": 0.3, "kinds": ["nan"], "per_round": 1.0}}, rounds={"count": 3})
    ended = attempts_of(described)
    declined = [client for one in ended for client in one.record.clients if client.fate is Fate.DECLINED]
    assert declined
    assert all("diverged" in client.reason for client in declined)
    assert all(one.record.reported == 6 for one in ended if one.record.committed)
    assert all(bool(values.isfinite().all()) for values in ended[-1].model.master.values())


def test_slow_devices_send_what_they_have() -> None:
    described = table(
        fleet={"speed": {"step_s": 2.0, "spread": 1.0}},
        rounds={"window_s": 12.0, "over_selection": 1.0, "count": 3},
        training={"local_epochs": 5},
    )
    ended = attempts_of(described)
    assert sum(one.record.partial for one in ended) > 0
    partial = [client for one in ended for client in one.record.clients if client.fate is Fate.PARTIAL]
    assert all(0 < client.steps_done < client.steps_planned for client in partial)


def test_a_round_that_too_few_report_in_is_tried_again() -> None:
    described = table(
        fleet={"dropouts": {"per_round": 0.7}},
        rounds={"minimum": 4, "over_selection": 1.0, "window_s": 60.0, "count": 2},
    )
    ended = attempts_of(described)
    assert any(not one.record.committed for one in ended)
    assert [one.record.round for one in ended if one.record.committed] == [1, 2]
    lost = [client for one in ended for client in one.record.clients if client.fate is Fate.LOST]
    assert lost
    assert all(client.silent_s > 0 for client in lost)


def test_a_run_that_may_not_try_for_ever_fails_with_the_reason() -> None:
    described = table(
        fleet={"dropouts": {"per_round": 1.0}}, rounds={"minimum": 4, "window_s": 60.0, "attempts_max": 2}
    )
    ended = attempts_of(described)
    assert len(ended) == 2
    assert ended[-1].standing.status is RunStatus.FAILED
    assert "abandoned 2 times" in ended[-1].standing.reason


def test_who_did_not_train_measures_the_model_where_the_run_says_so() -> None:
    described = table(partition={"holdout": 0.3}, evaluation={"every": 2, "clients": 4}, training={"evaluate": True})
    ended = attempts_of(described)
    assert [one.record.task for one in ended] == [
        Task.TRAINING,
        Task.TRAINING,
        Task.EVALUATION,
        Task.TRAINING,
        Task.TRAINING,
        Task.EVALUATION,
    ]
    assert all(0 <= one.record.evaluation["accuracy"] <= 1 for one in ended)
    trained = {client.client for client in ended[1].record.clients}
    assert trained.isdisjoint(client.client for client in ended[2].record.clients)


def test_a_run_stops_early_by_its_own_rule() -> None:
    described = table(
        partition={"holdout": 0.3},
        training={"evaluate": True},
        rounds={"count": 40},
        stop={"metric": "evaluation.accuracy", "mode": "max", "target": 0.05},
    )
    ended = attempts_of(described)
    assert len(ended) < 40
    assert "stopped early" in ended[-1].standing.reason


def test_a_run_that_improves_no_more_ends_with_the_name_of_its_best_model() -> None:
    described = table(
        partition={"holdout": 0.3},
        training={"evaluate": True},
        fleet={"dropouts": {"per_round": 0.5}},
        rounds={"count": 40, "minimum": 4, "over_selection": 1.0, "window_s": 60.0},
        stop={"metric": "evaluation.accuracy", "mode": "max", "patience": 2},
    )
    ended = attempts_of(described)
    assert not all(one.record.committed for one in ended), "in some attempts nothing is measured"
    values = {one.record.round - 1: one.record.judged.value for one in ended if one.record.judged is not None}
    best = max(values, key=lambda version: (values[version] or 0.0, -version))
    assert best == max(values) - 2
    assert f"in 2 measurements; the best is {values[best]:.6g}, of version {best}" in ended[-1].standing.reason


class NeverRight(nn.Module):
    """Says a class that no digit is of, whatever it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(64, 11)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.top(inputs.flatten(1)) + 1000.0 * torch.eye(11)[10]
        return outputs


def test_a_measurement_of_zero_counts_like_any_other() -> None:
    described = table(
        partition={"holdout": 0.3},
        training={"evaluate": True},
        engine={"name": "sequential"},
        rounds={"count": 6},
        stop={"metric": "evaluation.accuracy", "mode": "max", "patience": 2},
    )
    ended = attempts_of(described | {"model": {"name": f"{__name__}:NeverRight"}})
    assert len(ended) == 3
    assert "has not improved in 2 measurements; the best is 0, of version 0" in ended[-1].standing.reason


def test_changes_go_down_the_line_where_the_run_says_so() -> None:
    few = {"partition": {"clients": 9}, "rounds": {"count": 6}}
    plain, changes = attempts_of(table(**few)), attempts_of(table(downlink={"name": "change"}, **few))
    assert changes[-1].record.bytes_down < plain[-1].record.bytes_down / 2
    assert changes[0].record.bytes_down == plain[0].record.bytes_down  # nobody has a model yet


def test_who_comes_for_the_first_time_fetches_the_whole_model_whatever_changes_there_are() -> None:
    described = table(downlink={"name": "change"}, rounds={"count": 3})
    ended, met = attempts_of(described), set[str]()
    for one in ended:
        for client in one.record.clients:
            if client.client not in met and client.fate is Fate.ACCEPTED:
                assert client.bytes_down == ended[0].model.file.size_bytes
        met |= {client.client for client in one.record.clients}
    assert any(client.bytes_down < ended[0].model.file.size_bytes for client in ended[-1].record.clients)


def test_the_window_tunes_itself_by_what_the_devices_show() -> None:
    described = table(rounds={"self_tuning": True, "window_s": 3600.0, "count": 8}, fleet={"speed": {"step_s": 1.0}})
    ended = attempts_of(described)
    assert ended[-1].record.window_s < 3600.0
    assert ended[-1].record.tuned


def test_a_measurement_that_no_client_can_make_is_refused_with_what_to_do() -> None:
    with pytest.raises(SimulationError, match="holdout"):
        attempts_of(table(training={"evaluate": True}))
    with pytest.raises(SimulationError, match=r"evaluate_after .* name an app in \[clients\]"):
        attempts_of(table(training={"evaluate_after": True}))
    with pytest.raises(SimulationError, match=r"inexactness .* name an app in \[clients\]"):
        attempts_of(table(training={"inexactness": True}))


def test_a_fleet_that_never_comes_fails_its_run_with_a_sentence_and_not_the_sweep() -> None:
    nobody, everybody = {"by_hour": [0.0] * 24}, {"by_hour": [1.0] * 24}
    in_vain, fine = simulate(table(sweep={"fleet.hours": [nobody, everybody]})).trials
    assert (in_vain.status, in_vain.rows) == (RunStatus.FAILED, ())
    assert "round 1 did not begin within 30 days of virtual time: waiting for clients: 0 of" in in_vain.reason
    assert fine.status is RunStatus.FINISHED


def test_more_reports_than_there_are_clients_are_refused_with_both_numbers() -> None:
    with pytest.raises(SimulationError, match=r"rounds\.target is 6, but there are only 3 clients"):
        attempts_of(table(partition={"clients": 3}))


def test_more_than_the_clients_may_be_drawn_by_weight_and_overrides_are_minded() -> None:
    base = table() | {"partition": {"scheme": "iid", "clients": 5}}
    drawn = base | {"rounds": {"count": 1, "target": 8, "weighting": "proportional"}}
    assert attempts_of(drawn)[-1].standing.status is RunStatus.FINISHED
    lowered = base | {"rounds": {"count": 1, "target": 8}, "override": [{"first_round": 1, "target": 3}]}
    assert attempts_of(lowered)[-1].standing.status is RunStatus.FINISHED
    raised = base | {"rounds": {"count": 3, "target": 3}, "override": [{"first_round": 2, "target": 30}]}
    with pytest.raises(SimulationError, match=r"rounds\.target is 30, but there are only 5 clients"):
        attempts_of(raised)


def test_a_round_that_is_always_in_vain_fails_its_run_and_not_the_sweep() -> None:
    slow = {"fleet": {"speed": {"step_s": 1000.0, "spread": 0.0}, "partial_work": False}}
    described = table(rounds={"count": 1, "minimum": 2}, **slow) | {"sweep": {"rounds.window_s": [10.0, 100_000.0]}}
    in_vain, fine = simulate(described).trials
    assert (in_vain.status, len(in_vain.rows)) == (RunStatus.FAILED, 200)
    assert "round 1 was abandoned 200 times" in in_vain.reason
    assert fine.status is RunStatus.FINISHED
