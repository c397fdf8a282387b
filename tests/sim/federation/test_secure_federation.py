"""Secure rounds of an experiment: the machine's phases on a fleet, the integers that an SDK would mask, exact sums."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sim.engines.clients.sites import Scripted, careless_training
from tests.sim.federation.worlds import attempts_of, hashes, table
from umbel.aggregation.codec.modular import lift
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import ServerStep
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.records import Fate
from umbel.aggregation.secagg.messages import share_keys_bytes
from umbel.aggregation.secagg.numbers.contribution import contribution
from umbel.aggregation.secagg.numbers.plan import first_plans
from umbel.aggregation.secagg.numbers.totals import totals
from umbel.aggregation.secagg.parameters import parameters_for
from umbel.aggregation.types import ClientId, RunId
from umbel.client.training.shared_state import SharedState
from umbel.sim.bench.secagg.cohort import secure_plan
from umbel.sim.experiment.file import TrialSpec, experiment_of
from umbel.sim.experiment.trials import Watcher
from umbel.sim.federation import uplink as uplink_module
from umbel.sim.federation.federation import SimulatedAttempt
from umbel.sim.federation.memory import Memory
from umbel.sim.federation.rows import Row
from umbel.sim.federation.uplink import MaskedUplink, PlainUplink
from umbel.sim.federation.window import Cohort, without_enough_work
from umbel.sim.simulation import simulate

LOST_IN = ("download", "training", "upload", "advertise_keys", "share_keys", "consistency_check", "unmasking")
ALIKE = {"speed": {"spread": 0.0, "jitter": 0.0}, "network": {"spread": 0.0, "jitter": 0.0}}


def secure(**changes: Any) -> dict[str, Any]:
    """The small experiment with masked updates."""
    rounds = {"count": 3, "target": 8, "minimum": 3, "over_selection": 1.2, "window_s": 60.0}
    sections = {"secure_aggregation": {}, "codec": {"name": "integer"}, **changes}
    return table(**sections | {"rounds": rounds | changes.get("rounds", {})})


def private(**changes: Any) -> dict[str, Any]:
    return secure(privacy={"noise_multiplier": 1.0, "clip_norm": 1.0}, **changes)


def losing(per_round: float, stage: str) -> dict[str, Any]:
    """A fleet whose devices are lost in one stage alone."""
    weights = dict.fromkeys(LOST_IN, 0.0) | {"training": 1e-9} | {stage: 1.0}
    return {"dropouts": {"per_round": per_round, **weights}}


def both_ways(described: dict[str, Any]) -> tuple[list[SimulatedAttempt], list[SimulatedAttempt]]:
    """Its attempts without masks, and with them."""
    engine = {"name": "batched"}
    with_masks = {**described, "engine": {**engine, "masks": True}}
    return attempts_of(described), attempts_of(with_masks)


def test_a_coordinator_learns_sums_alone() -> None:
    ended = attempts_of(secure())
    assert [one.record.round for one in ended if one.record.committed] == [1, 2, 3]
    for one in ended:
        assert one.record.secure
        assert all(client.steps_done == 0 for client in one.record.clients)
        assert one.record.sample_count > one.record.reported
        assert one.record.metrics["loss"] > 0
    assert ended[-1].record.metrics["loss"] < ended[0].record.metrics["loss"]
    assert len({one.model.file.sha256 for one in ended}) == 3


@pytest.mark.parametrize("stage", LOST_IN)
def test_masks_change_nothing_wherever_devices_fall_silent(stage: str) -> None:
    without, with_masks = both_ways(secure(fleet=losing(0.25, stage)))
    assert [one.record for one in without] == [one.record for one in with_masks]
    assert [one.standing for one in without] == [one.standing for one in with_masks]
    assert any(one.record.committed for one in without)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("advertise_keys", "advertised keys in time"),
        ("share_keys", "shared their keys in time"),
        ("upload", "is over with"),
        ("consistency_check", "signed who is in the sum in time"),
        ("unmasking", "could not be unmasked in time"),
    ],
)
def test_too_few_in_a_phase_and_the_attempt_is_given_up_for_that(stage: str, words: str) -> None:
    changes = {"fleet": losing(0.8, stage), "rounds": {"attempts_max": 2, "count": 1}}
    without, with_masks = both_ways(secure(**changes))
    first = without[0].record
    assert not first.committed
    assert words in first.reason
    assert [one.record for one in without] == [one.record for one in with_masks]
    if stage not in ("consistency_check", "unmasking"):  # there they had reported, and are heard of last then
        assert any(client.fate is Fate.LOST for client in first.clients)


SLOW = {**ALIKE, "speed": {**ALIKE["speed"], "samples_per_s": 0.3}}
"""All devices are alike, and in a minute's window do one step of several."""


def test_who_has_not_done_all_of_its_work_declines_and_there_is_no_sum() -> None:
    without, with_masks = both_ways(secure(fleet=SLOW, rounds={"count": 1, "attempts_max": 1}))
    first = without[0].record
    assert not first.committed
    assert {client.fate for client in first.clients} == {Fate.DECLINED}
    assert {client.reason for client in first.clients} == {
        "this client did less work than minimum_work requires, so its update would stand out from the others"
    }
    assert [one.record for one in without] == [one.record for one in with_masks]


def test_where_the_file_says_that_less_is_enough_the_same_fleet_has_a_sum() -> None:
    less = {"secure_aggregation": {"minimum_work": 0.01}}
    (ended,) = attempts_of(secure(fleet=SLOW, rounds={"count": 1, "attempts_max": 1}, **less))
    assert ended.record.committed, ended.record.reason
    assert ended.record.partial == ended.record.reported > 0


def test_with_noise_a_step_is_enough() -> None:
    (ended,) = attempts_of(private(fleet=SLOW, rounds={"count": 1, "attempts_max": 1}))
    assert ended.record.committed, ended.record.reason


@pytest.mark.parametrize(
    ("floor", "fetched_s", "steps_done", "said"),
    [
        (1.0, 75.0, 4, False),
        (1.0, 75.1, 4, True),
        (1.0, 1.0, 3, True),
        (0.5, 75.1, 4, True),
        (0.5, 1.0, 2, False),
        (0.5, 1.0, 1, True),
        (0.0, 99.0, 1, False),
    ],
)
def test_who_will_send_nothing_is_who_has_the_model_late_or_too_little_work_done(
    floor: float, fetched_s: float, steps_done: int, said: bool
) -> None:
    plan = secure_plan(5, bits=20, window_s=100.0)
    assert plan.secure is not None
    plan = replace(plan, secure=replace(plan.secure, minimum_work=floor))
    work, names = WorkDone(10, steps_done, 4, "0" * 64), [ClientId("anna"), ClientId("lost")]
    fates: Any = SimpleNamespace(fetched_s=np.array([fetched_s, 99.0]), report_s=np.array([fetched_s, math.inf]))
    found = without_enough_work(plan, Cohort(names, fates, [work, work]))
    assert found.keys() == ({"anna"} if said else set()), "who is lost says nothing"


def test_a_sum_that_was_opened_in_vain_says_who_is_asked_next() -> None:
    """Some of ten are silent when shares are to be revealed: they may not be asked for another such sum."""
    ended = attempts_of(secure(fleet=losing(0.6, "unmasking"), rounds={"attempts_max": 2, "count": 1}))
    failed = ended[0]
    assert failed.standing.state.before
    (opened,) = failed.standing.state.before.opened
    in_sum = {one.client for one in failed.record.clients if one.report_s is not None}
    assert set(opened.clients) == in_sum
    assert failed.standing.state.avoid, "who kept silent is asked last"
    assert set(failed.standing.state.avoid) < in_sum
    asked_next = {one.client for one in ended[1].record.clients}
    assert not asked_next & in_sum


def test_bytes_are_those_of_the_model_the_update_and_the_messages() -> None:
    described = secure(fleet=ALIKE, rounds={"over_selection": 1.0, "count": 1})
    (ended,) = attempts_of(described)
    n, layout = 8, ended.model.layout
    assert ended.record.reported == n
    plan = experiment_of(described).trials[0].run.first_plan(layout.n_values)
    update = MaskedUplink(plan, layout, {}, keeps=False).update_bytes
    up = 132 + share_keys_bytes(n - 1) + update + 64 + (8 + 37 * n)
    down = ended.model.file.size_bytes + (36 + 132 * n) + (4 + 4 * n + 114 * (n - 1)) + (4 + 4 * n) + (4 + 68 * n)
    assert {one.bytes_up for one in ended.record.clients} == {up}
    assert {one.bytes_down for one in ended.record.clients} == {down}
    assert 4 * 0.05 < ended.record.wall_s - ended.record.open_s < 5 * 0.05, "who is in it, signatures, those, shares"


def test_an_update_waits_until_it_is_said_who_masks() -> None:
    """Quick devices have trained long before a silent one is given up: nobody's report comes before that. Who is lost
    after its report was there until then.
    """
    weights = losing(0.7, "share_keys")["dropouts"] | {"consistency_check": 3.0}
    ended = attempts_of(secure(fleet={"dropouts": weights}, rounds={"count": 1, "attempts_max": 3}))[0]
    late = [client for client in ended.record.clients if "shared their keys" in client.reason]
    reported = [client for client in ended.record.clients if client.report_s is not None]
    assert late
    assert len(late) + len(reported) == ended.record.selected
    assert all((client.report_s or 0.0) > 0.125 * ended.record.window_s for client in reported)
    assert all(client.silent_s == 0 for client in reported)
    assert "signed who is in the sum in time" in ended.record.reason


def test_an_update_that_diverges_is_declined() -> None:
    corrupt = {"corrupt": {"share": 0.3, "kinds": ["nan"], "per_round": 1.0}}
    without, with_masks = both_ways(secure(fleet=corrupt))
    declined = [one for each in without for one in each.record.clients if one.fate is Fate.DECLINED]
    assert declined
    assert all("diverged" in one.reason for one in declined)
    assert [one.record for one in without] == [one.record for one in with_masks]
    assert all(bool(values.isfinite().all()) for values in without[-1].model.master.values())


def test_threads_give_the_bits_of_the_plain_loop_under_masks() -> None:
    ours, theirs = (attempts_of(secure(engine={"name": name})) for name in ("sequential", "threads"))
    assert [one.record for one in ours] == [one.record for one in theirs]


def test_a_sum_that_has_wrapped_is_given_up_and_the_next_has_room() -> None:
    """Updates grow ten thousandfold from one round to the next, which was planned for half as much again."""
    described = secure(training={"learning_rate": 0.0001}, override=[{"first_round": 3, "learning_rate": 1.0}])
    without, with_masks = both_ways(described)
    assert [(one.record.round, one.record.committed) for one in without] == [
        (1, True),
        (2, True),
        (3, False),
        (3, True),
    ]
    assert "some have overflowed" in without[2].record.reason
    before = without[2].standing.state.before
    assert before
    assert len(before.opened) == 1
    assert [one.record for one in without] == [one.record for one in with_masks]


@pytest.mark.nightly
def test_masks_change_nothing_where_not_all_are_neighbours() -> None:
    """Above 300 clients who shares with whom hangs on the keys, and on that the messages and who can go on."""
    described = secure(
        partition={"clients": 420, "alpha": 100.0},
        rounds={"count": 1, "target": 310, "over_selection": 1.05},
        fleet={"dropouts": {"per_round": 0.06}},
    )
    without, with_masks = both_ways(described)
    assert parameters_for(without[0].record.selected).k < 300
    assert [one.record for one in without] == [one.record for one in with_masks]
    assert without[0].record.committed


# --- the integers -----------------------------------------------------------------------------------------------------


def a_round(**tensors: torch.Tensor) -> tuple[RoundPlan, ModelState]:
    """A plan of three clients for a model of these tensors."""
    plan = RoundPlan(RunId("r"), 1, 1, 3, 3, 1.0, 10.0, Weighting.SAMPLES, 100, 64.0, seed=1)
    codec = CodecPlan(Codec.INTEGER, as_float32(64.0), key=7)
    codec, secure = first_plans(codec, weight_unit=50, clients_max=3, minimum=3)
    return replace(plan, codec=codec, secure=secure), ModelState.first(tensors)


CLIENTS = [ClientId(name) for name in "abc"]
RANKS = {name: rank for rank, name in enumerate(CLIENTS)}
WEIGHTS = (3, 1, 50)
WORKS = [WorkDone(n, 1, 1, "0" * 64) for n in WEIGHTS]


def test_the_model_is_that_of_the_sum_of_the_integers() -> None:
    plan, model = a_round(w=torch.zeros(50, 7))
    values = torch.randn(3, 350, generator=torch.Generator().manual_seed(0))
    uplink = MaskedUplink(plan, model.layout, RANKS, keeps=False)
    uplink.add(CLIENTS, values, WORKS, WEIGHTS)
    kept = MaskedUplink(plan, model.layout, RANKS, keeps=True)
    kept.add(CLIENTS, values, WORKS, WEIGHTS)
    bits = uplink.composition.secure.bits
    levels = sum(lift(torch.cat(list(one.levels())), bits).to(torch.int64) for one in kept.made.values())
    words = sum(one.words for one in kept.made.values())
    assert isinstance(levels, torch.Tensor)
    assert isinstance(words, torch.Tensor)
    found = uplink.totals(CLIENTS, None)
    plain = totals(uplink.composition, levels, words, [0, 1, 2])
    assert (found.sum_sha256, found.total_weight) == (plain.sum_sha256, sum(WEIGHTS))
    assert model.after(found.mean, ServerStep(), None).file == model.after(plain.mean, ServerStep(), None).file
    exact = (values.double() * torch.tensor(WEIGHTS).unsqueeze(1)).sum(0) / sum(WEIGHTS)
    torch.testing.assert_close(found.mean.mean_slice(0, 350), exact, rtol=0, atol=0.05)


def test_a_row_is_read_in_the_pieces_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of an update's norm depends on them."""
    client = Scripted(careless_training)
    client.model = torch.nn.Linear(400, 400)
    shared = SharedState(client)
    sent = [len(piece) for piece in shared.changes(shared.shared())]
    assert len(sent) == 3, "the weights are more than one piece"
    plan, model = a_round(**shared.shared())
    read = list[list[int]]()

    def noting(composition: Any, change: Any, *rest: Any, **named: Any) -> Any:
        read.append([len(piece) for piece in change()])
        return contribution(composition, change, *rest, **named)

    monkeypatch.setattr(uplink_module, "contribution", noting)
    MaskedUplink(plan, model.layout, RANKS, keeps=False).add(CLIENTS[:1], torch.zeros(1, sum(sent)), WORKS[:1], [3])
    assert read == [sent]


def test_counts_of_simulated_clients_are_added_up_as_words() -> None:
    plan, model = a_round(w=torch.zeros(50, 7))
    assert plan.secure is not None
    plan = replace(plan, secure=replace(plan.secure, counts={"n": 1}, evaluation_counts={"confusion": 4}))
    works = [
        replace(work, counts={"n": (i,)}, evaluation_counts={"confusion": (i, 1, 2, 3)}, evaluation_sample_count=9)
        for i, work in enumerate(WORKS)
    ]
    uplink = MaskedUplink(plan, model.layout, RANKS, keeps=False)
    uplink.add(CLIENTS, torch.zeros(3, 350), works, WEIGHTS)
    found = uplink.totals(CLIENTS, None)
    assert (found.counts, found.evaluation_counts) == ({"n": (3,)}, {"confusion": (3, 3, 6, 9)})


def test_all_metrics_of_simulated_clients_are_added_up_without_a_list() -> None:
    plan, model = a_round(w=torch.zeros(50, 7))
    assert plan.secure is not None
    plan = replace(plan, secure=replace(plan.secure, metrics="all", evaluation="all"))
    works = [
        replace(work, metrics={"new": 0.5}, evaluation={"auc": 0.25}, evaluation_sample_count=9, weights={})
        for work in WORKS
    ]
    uplink = MaskedUplink(plan, model.layout, RANKS, keeps=False)
    uplink.add(CLIENTS, torch.zeros(3, 350), works, WEIGHTS)
    found = uplink.totals(CLIENTS, None)
    assert (found.metrics, found.evaluation) == ({"new": 0.5}, {"auc": 0.25})


def test_where_the_integers_are_the_same_the_model_is_that_of_a_plain_round() -> None:
    """Tensors that no codec rounds travel as the grid's integers in both kinds of rounds."""
    plan, model = a_round(running_mean=torch.zeros(40), counter=torch.tensor([3, 5], dtype=torch.int64))
    assert not any(spec.is_coded for spec in model.layout.owners())
    values = torch.randn(3, 42, generator=torch.Generator().manual_seed(0)) * 10
    masked = MaskedUplink(plan, model.layout, RANKS, keeps=False)
    masked.add(CLIENTS, values, WORKS, WEIGHTS)
    plain = PlainUplink(replace(plan, codec=CodecPlan(), secure=None), model.layout, RANKS, 0, Memory())
    plain.add(CLIENTS, values, WORKS, WEIGHTS)
    ours = model.after(masked.totals(CLIENTS, None).mean, ServerStep(), None)
    theirs = model.after(plain.codec.mean(plain.total, plain.parts), ServerStep(), None)
    assert ours.file == theirs.file
    assert ours.file != model.file


# --- privacy ----------------------------------------------------------------------------------------------------------


def test_noise_is_drawn_from_the_seed_and_masks_change_nothing() -> None:
    described = private(fleet=losing(0.1, "upload"))
    without, with_masks = both_ways(described)
    assert [one.record for one in without] == [one.record for one in with_masks]
    assert hashes(described) == [one.model.file.sha256 for one in without if one.record.committed]
    assert hashes({**described, "seeds": [1]}) != hashes(described)
    assert all(one.record.metrics == {} for one in without)


def test_nobody_draws_the_same_noise_twice() -> None:
    run = experiment_of(private()).trials[0].run
    layout = Layout.of_state({"w": torch.zeros(50, 7)})
    first = run.first_plan(layout.n_values)
    drawn = set[bytes]()
    for plan in (first, replace(first, attempt=2), replace(first, number=2), replace(first, seed=1)):
        uplink = MaskedUplink(plan, layout, RANKS, keeps=True)
        uplink.add(CLIENTS, torch.zeros(3, 350), WORKS, WEIGHTS)
        drawn |= {torch.cat(list(one.levels())).numpy().tobytes() for one in uplink.made.values()}
    assert len(drawn) == 4 * len(CLIENTS)


def test_epsilon_grows_with_every_sum_that_is_revealed() -> None:
    ended = attempts_of(private(fleet=losing(0.2, "unmasking"), rounds={"count": 8, "window_s": 20.0}))
    costs = [one.record.epsilon for one in ended]
    assert all(cost is not None for cost in costs)
    assert costs == sorted(costs, key=lambda cost: cost or 0.0)
    assert len(set(costs)) == len(costs), "a sum that was opened in vain costs what any other does"


def test_a_private_run_ends_at_its_budget() -> None:
    ended = attempts_of(private(fleet=losing(0.35, "unmasking"), rounds={"count": 4}))
    assert any(not one.record.committed for one in ended)
    assert sum(one.record.committed for one in ended) < 4
    assert ended[-1].standing.status is RunStatus.FINISHED
    assert "the privacy budget of 4 sums is spent" in ended[-1].standing.reason


def test_a_model_that_privacy_cannot_have_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="GroupNorm or LayerNorm"):
        attempts_of(
            private(
                model={"name": "tests.sim.federation.worlds:with_statistics", "hidden": None},
                engine={"name": "sequential"},
            )
        )


# --- what is kept -----------------------------------------------------------------------------------------------------


class _Interrupting(Watcher):
    """Breaks off after so many rows."""

    def __init__(self, n_rows: int) -> None:
        self.n_left = n_rows

    def row(self, trial: TrialSpec, row: Row) -> None:
        self.n_left -= 1
        if not self.n_left:
            raise KeyboardInterrupt


@pytest.mark.nightly
@pytest.mark.slow
def test_a_private_run_that_was_broken_off_ends_in_the_same_model(tmp_path: Path) -> None:
    described = private(fleet=losing(0.2, "unmasking"), rounds={"count": 5})
    whole = simulate(described)
    with pytest.raises(KeyboardInterrupt):
        simulate(described, tmp_path / "out", watcher=_Interrupting(3))
    resumed = simulate(described, tmp_path / "out")
    assert resumed.trials[0].model_sha256 == whole.trials[0].model_sha256
    ours, theirs = ([replace(row, wall_s=0.0) for row in one.trials[0].rows] for one in (whole, resumed))
    assert ours == theirs
    assert ours[-1].epsilon == resumed.summary()["runs"][0]["epsilon"] is not None
