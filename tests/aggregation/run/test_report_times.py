"""The estimate of report times against what is known of made-up fleets, and against its own definition."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.run.report_times import Observation, Seen, at_most, estimate, observed, tabulate


def seen(kind: Seen, seconds: float, at: float = 0.0, tier: str = "") -> Observation:
    return Observation(at, tier, 1000, kind, seconds)


def curve_of(observations: list[Observation], until_s: float = 1000.0) -> tuple[list[float], list[float], list[float]]:
    curve = estimate(tabulate(observations), np.ones(len(observations)), until_s)
    return list(curve.times_s), list(curve.reported), list(curve.at_work)


def at(observations: list[Observation], seconds: float) -> float:
    curve = estimate(tabulate(observations), np.ones(len(observations)), 1000.0)
    return float(curve.reported[np.searchsorted(curve.times_s, seconds, side="right") - 1])


def test_with_everything_seen_it_is_the_share_that_has_reported() -> None:
    observations = [seen(Seen.REPORTED, float(i)) for i in range(1, 81)]
    observations += [seen(Seen.NEVER, 40.5)] * 20
    assert at(observations, 20.0) == pytest.approx(0.20)
    assert at(observations, 60.0) == pytest.approx(0.60)


def test_of_those_that_went_out_of_sight_each_counts_as_the_others_that_were_left() -> None:
    """100 at work; 50 report at 10 s; the round closes on 30 of the others; 10 of the last 20 report at 20 s."""
    observations = [seen(Seen.REPORTED, 10.0)] * 50 + [seen(Seen.AT_WORK, 15.0)] * 30
    observations += [seen(Seen.REPORTED, 20.0)] * 10 + [seen(Seen.NEVER, 25.0)] * 10
    assert at(observations, 12.0) == pytest.approx(0.5)
    assert at(observations, 20.0) == pytest.approx(0.75)


@pytest.mark.parametrize("closing_s", [150.0, 250.0])
def test_short_windows_do_not_bend_the_curve(closing_s: float) -> None:
    """Nine in ten rounds close early, losses and all; what the tenth sees is still right."""
    rng = np.random.default_rng(3)
    work_s, lost_s = rng.lognormal(5, 0.8, 20_000), np.where(rng.random(20_000) < 0.2, rng.random(20_000) * 300, np.inf)
    open_s = np.where(rng.random(20_000) < 0.9, closing_s, 800.0)
    observations = [
        seen(Seen.REPORTED, w)
        if w <= min(lost, closes)
        else seen(Seen.NEVER, lost)
        if lost <= closes
        else seen(Seen.AT_WORK, closes)
        for w, lost, closes in zip(work_s, lost_s, open_s, strict=True)
    ]
    for moment in (100.0, 300.0, 600.0):
        truth = float(np.mean((work_s <= moment) & (work_s <= lost_s)))
        assert at(observations, moment) == pytest.approx(truth, abs=0.02)


def test_beyond_what_was_watched_it_errs_towards_late() -> None:
    rng = np.random.default_rng(4)
    work_s = rng.lognormal(5, 0.5, 5000)
    observations = [seen(Seen.REPORTED, w) if w <= 150 else seen(Seen.AT_WORK, 150.0) for w in work_s]
    known, guess = float(np.mean(work_s <= 150)), at(observations, 600.0)
    assert known < guess < float(np.mean(work_s <= 600))


@given(
    st.lists(
        st.tuples(st.sampled_from(Seen), st.floats(0, 2000), st.floats(0.01, 1)),
        min_size=1,
        max_size=60,
    )
)
def test_chances_are_chances_and_grow_with_time(rows: list[tuple[Seen, float, float]]) -> None:
    table = tabulate([seen(kind, seconds) for kind, seconds, _ in rows])
    curve = estimate(table, np.array([weight for _, _, weight in rows]), 1000.0)
    assert curve.times_s[-1] == 1000.0
    assert all(a < b for a, b in pairwise(curve.times_s))
    assert all(a <= b + 1e-9 for a, b in pairwise(curve.reported))
    assert all(a >= b - 1e-9 for a, b in pairwise(curve.at_work))
    assert curve.reported.min() >= 0
    assert (curve.reported + curve.at_work).max() <= 1 + 1e-9
    assert curve.n_known.max() <= len(rows) + 1e-6


def test_nothing_seen_is_nothing_expected() -> None:
    times_s, reported, at_work = curve_of([seen(Seen.AT_WORK, 10.0)] * 30)
    assert times_s[-1] == 1000.0
    assert set(reported) == {0.0}
    assert at_work[-1] == 1.0


def test_a_difference_is_told_from_chance() -> None:
    rng = np.random.default_rng(5)
    known, slow, like = (
        estimate(tabulate([seen(Seen.REPORTED, w) for w in rng.lognormal(mean, 0.5, n)]), np.ones(n), 1000.0)
        for mean, n in ((4.0, 20_000), (4.2, 400), (4.0, 400))
    )
    assert slow.differs_from(known, 400)
    assert not like.differs_from(known, 400)


# --- what a round's record shows --------------------------------------------------------------------------------------


def record(*clients: ClientRecord, committed: bool = True) -> RoundRecord:
    return RoundRecord(
        "demo", 1, 1, committed, "why", 1, None, 5000.0, 62.0, 3, 1, 0, 2, 10, 0, 0, clients=clients,
        open_s=60.0, model_bytes=1234,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (ClientRecord("a", Fate.ACCEPTED, "", 1, report_s=12.0, tier="lab"), (Seen.REPORTED, 12.0)),
        (ClientRecord("a", Fate.PARTIAL, "", 1, report_s=55.0, tier="lab"), (Seen.REPORTED, 55.0)),
        (ClientRecord("a", Fate.RELEASED, "abandoned", 1, report_s=30.0, tier="lab"), (Seen.REPORTED, 30.0)),
        (ClientRecord("a", Fate.RELEASED, "", 1, silent_s=1.0, tier="lab"), (Seen.AT_WORK, 60.0)),
        (ClientRecord("a", Fate.LOST, "", 1, silent_s=45.0, tier="lab"), (Seen.NEVER, 15.0)),
        (ClientRecord("a", Fate.LOST, "", 1, silent_s=100.0, tier="lab"), (Seen.NEVER, 0.0)),
        (ClientRecord("a", Fate.DECLINED, "", 1, tier="lab"), (Seen.NEVER, 0.0)),
    ],
)
def test_a_record_shows_what_became_of_each_client(client: ClientRecord, expected: tuple[Seen, float]) -> None:
    assert observed(record(client)) == (Observation(5000.0, "lab", 1234, *expected),)


def test_an_evaluation_shows_nothing_of_training() -> None:
    measured = ClientRecord("a", Fate.ACCEPTED, "", 1, report_s=1.0)
    assert observed(replace(record(measured), task=Task.EVALUATION)) == ()


def exact(k: int, n: int, p: float) -> float:
    """The sum in integers, over the common denominator. Sums of fractions would take seconds."""
    yes, whole = p.as_integer_ratio()
    no = whole - yes
    if k < 0 or not no:
        return float(k >= n)
    total = ways = no**n  # of `whole**n`: those with none
    for j in range(min(k, n)):
        ways = ways * (n - j) * yes // ((j + 1) * no)  # leaves no remainder
        total += ways
    return float(total / whole**n)


@given(st.integers(-2, 130), st.integers(0, 128), st.floats(0, 1))
def test_it_is_the_sum_of_the_probabilities(k: int, n: int, p: float) -> None:
    assert float(at_most(k, n, p)) == pytest.approx(exact(k, n, p), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("k", "n", "p"), [(255, 300, 0.85), (950, 1000, 0.97), (9, 1000, 0.001), (999, 1000, 0.999)])
def test_it_holds_in_the_tails(k: int, n: int, p: float) -> None:
    assert float(at_most(k, n, p)) == pytest.approx(exact(k, n, p), rel=1e-9)


def test_a_million_is_no_harder() -> None:
    """Against the normal law, which is good to a few parts in ten thousand there."""
    n, p = 1 << 20, 0.8
    deviation = math.sqrt(n * p * (1 - p))
    for z in (-3.0, 0.0, 2.0):
        k = math.floor(n * p + z * deviation)
        normal = 0.5 * math.erfc(-(k + 0.5 - n * p) / deviation / math.sqrt(2))
        assert float(at_most(k, n, p)) == pytest.approx(normal, abs=5e-4)


def test_arrays_are_broadcast() -> None:
    table = at_most([[1], [2]], 3, [0.0, 0.5, 1.0])
    assert table.shape == (2, 3)
    assert np.allclose(table, [[1, 0.5, 0], [1, 0.875, 0]])
