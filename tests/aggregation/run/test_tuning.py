"""The window that tunes itself: its arithmetic against simulation, its caution, its choice."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.report_times import Curve, Observation, Seen, estimate, tabulate
from umbel.aggregation.run.sections import Override, RoundsSection
from umbel.aggregation.run.tuning import (
    CONFIDENCE,
    EXPLORE_EVERY,
    NOTHING_KNOWN,
    OBSERVATIONS_MAX,
    OVER_SELECTION_MAX,
    Tuned,
    TuningFacts,
    foresee,
    next_plan,
    tune,
)
from umbel.aggregation.types import RunId

PLAN = RoundPlan(RunId("demo"), 5, 1, 20, 15, 1.3, 600.0, Weighting.SAMPLES, 1000, 64.0, seed=7)
HOUR_S = 3600.0
Sampler = Callable[[np.random.Generator], float]


def history(
    draw: Sampler, n_rounds: int = 20, lost: float = 0.1, every_s: float = HOUR_S, tier: str = "", seed: int = 0
) -> list[Observation]:
    """Rounds of 30 clients, all watched to the end."""
    rng = np.random.default_rng(seed)
    return [
        Observation(i * every_s, tier, 1000, Seen.NEVER if rng.random() < lost else Seen.REPORTED, draw(rng))
        for i in range(n_rounds)
        for _ in range(30)
    ]


def quick(rng: np.random.Generator) -> float:
    return float(rng.lognormal(4.0, 0.3))  # a median of 55 s


def slow(rng: np.random.Generator) -> float:
    return float(rng.lognormal(5.5, 0.3))  # 245 s


def tuned(observations: Sequence[Observation], plan: RoundPlan = PLAN, now: float = 21 * HOUR_S, **known: Any) -> Tuned:
    return tune(plan, 0.0, TuningFacts(observations, **known), now)


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def simulated(curve: Curve, plan: RoundPlan, n: int, window_s: float, n_runs: int) -> tuple[float, float, float, float]:
    """Share that commits, useful and all client seconds a round, and its duration, by playing rounds."""
    rng = np.random.default_rng(1)
    chances = np.diff(curve.reported, prepend=0.0)
    table = np.append(chances, 1 - chances.sum())
    times = np.append(curve.times_s, np.inf)
    drawn = np.sort(times[rng.choice(len(times), (n_runs, n), p=table / table.sum())], axis=1)
    drawn[drawn > window_s] = np.inf
    closes = np.minimum(drawn[:, plan.target - 1], window_s)
    is_in = np.arange(n)[None] < np.minimum(np.isfinite(drawn).sum(axis=1), plan.target)[:, None]
    commits = is_in.sum(axis=1) >= plan.minimum
    useful = np.where(is_in & commits[:, None], drawn, 0.0).sum(axis=1)
    total = np.minimum(drawn, closes[:, None]).sum(axis=1)
    return float(commits.mean()), float(useful.mean()), float(total.mean()), float(closes.mean())


@pytest.mark.parametrize("over_selection", [0, 5, 20])
@pytest.mark.parametrize("column", [40, 70, -1])
def test_the_formulas_are_what_playing_the_rounds_gives(over_selection: int, column: int) -> None:
    observations = history(quick, lost=0.15)
    curve = estimate(tabulate(observations), np.ones(len(observations)), 200.0)
    # Those that never report stay at work to the end: playing rounds from `reported` alone knows of no losses.
    curve = replace(curve, at_work=1 - curve.reported, n_known=np.full(len(curve.times_s), 1e12))
    plan = replace(PLAN, window_s=200.0)
    forecast = foresee(plan, 0.0, curve, None)
    n = int(forecast.n_asked[over_selection])
    window_s = float(curve.times_s[column])
    commits, useful, total, duration = simulated(curve, plan, n, window_s, 40_000)
    row = (over_selection, column)
    assert forecast.p_commit[row] == pytest.approx(commits, abs=0.01)
    assert forecast.useful_s[row] == pytest.approx(useful, rel=0.03, abs=2.0)
    assert forecast.total_s[row] == pytest.approx(total, rel=0.03)
    assert forecast.duration_s[row] == pytest.approx(duration, rel=0.03)


def test_a_choice_is_as_sure_as_promised_and_no_other_is_better_by_much() -> None:
    observations = history(slow, n_rounds=30)
    choice = tuned(observations)
    curve = estimate(tabulate(observations), np.ones(len(observations)), PLAN.window_s)
    forecast = foresee(PLAN, 0.0, curve, None)
    row = int(np.argmin(np.abs(forecast.n_asked - choice.over_selection * PLAN.target)))
    column = int(np.argmin(np.abs(forecast.window_s - choice.window_s)))
    assert forecast.p_commit[row, column] >= CONFIDENCE
    sure = forecast.goodput[forecast.p_commit >= CONFIDENCE]
    assert forecast.goodput[row, column] >= 0.96 * sure.max()
    assert choice.why.startswith("from 896 clients at all hours: 99.")


# --- caution ----------------------------------------------------------------------------------------------------------


def test_without_enough_to_go_by_the_run_file_holds_and_the_reason_says_so() -> None:
    nothing = tuned([])
    assert (nothing.window_s, nothing.over_selection) == (600.0, 1.3)
    assert nothing.why == "as the run file says: no report times are known yet"
    two_rounds = tuned(history(quick, n_rounds=2))
    assert two_rounds.window_s == 600.0
    assert two_rounds.why == "as the run file says: only 60 clients' times in 2 rounds are known"


def test_fewer_observations_ask_for_more() -> None:
    """The same chances known from 90 clients and from 1,500: less certainty is bought with more clients or time."""
    few, many = (tuned(history(quick, n_rounds=n, every_s=60.0), now=HOUR_S) for n in (3, 50))
    assert few.over_selection > many.over_selection


def test_where_no_choice_is_sure_the_surest_is_taken() -> None:
    choice = tuned(history(quick, lost=0.9))
    assert (choice.window_s, choice.over_selection) == (600.0, OVER_SELECTION_MAX)
    assert choice.why.startswith("no allowed choice is sure enough")


def test_after_a_failed_attempt_both_are_wider() -> None:
    observations = history(quick)
    attempts = [tuned(observations, replace(PLAN, attempt=attempt)) for attempt in (1, 2, 3, 40)]
    assert [a.window_s for a in attempts] == sorted(a.window_s for a in attempts)
    assert attempts[1].window_s > 1.9 * attempts[0].window_s
    assert attempts[1].over_selection == pytest.approx(1.25 * attempts[0].over_selection)
    assert (attempts[3].window_s, attempts[3].over_selection) == (600.0, OVER_SELECTION_MAX)
    assert "widened after 1 abandoned attempt, " in attempts[1].why
    unknown = tuned([], replace(PLAN, attempt=2))
    assert unknown.over_selection == pytest.approx(1.3 * 1.25)


def test_now_and_then_it_looks_further() -> None:
    observations = history(quick)
    usual, wide = (tuned(observations, replace(PLAN, number=n)) for n in (EXPLORE_EVERY - 1, EXPLORE_EVERY))
    assert wide.window_s == pytest.approx(2 * usual.window_s, rel=0.01)
    assert wide.over_selection == usual.over_selection


def test_a_window_that_was_too_short_is_found_out() -> None:
    """Rounds closed at 100 s have seen few of the slow; the estimate goes on beyond, and the choice with it."""
    short = [
        one if one.seconds <= 250 else replace(one, seen=Seen.AT_WORK, seconds=250.0)
        for one in history(slow, lost=0.02)
    ]
    assert tuned(short).window_s > 300.0


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.sampled_from(Seen), st.floats(0, 5000), st.sampled_from(["", "a", "b"])),
        max_size=150,
    ),
    st.integers(1, 20),
    st.integers(1, 3),
    st.sampled_from([None, 5, 100]),
)
def test_whatever_was_seen_the_choice_is_allowed(
    rows: list[tuple[float, Seen, float, str]], number: int, attempt: int, population: int | None
) -> None:
    plan = replace(PLAN, number=number, attempt=attempt)
    observations = [Observation(at, tier, 1000, seen, seconds) for at, seen, seconds, tier in rows]
    evidence = TuningFacts(observations, 1000, population, {"a": 3, "c": 1})
    choice = tune(plan, 30.0, evidence, 1e6)
    assert 30.0 <= choice.window_s <= plan.window_s
    assert 1.0 <= choice.over_selection <= OVER_SELECTION_MAX
    assert choice.why
    assert replace(plan, window_s=choice.window_s, over_selection=choice.over_selection).grid
    assert choice == tune(plan, 30.0, replace(evidence, observations=observations[::-1]), 1e6), "order is no evidence"


# --- which observations count -----------------------------------------------------------------------------------------


def test_the_hour_of_the_day_counts_where_it_makes_a_difference() -> None:
    """Three days, quick at night and slow by day."""
    rng = np.random.default_rng(0)
    observations = [
        Observation(hour * HOUR_S, "", 1000, Seen.REPORTED, quick(rng) if hour % 24 < 12 else slow(rng))
        for hour in range(72)
        for _ in range(30)
    ]
    night, day = (tuned(observations, now=hour * HOUR_S) for hour in (72 + 6, 72 + 18))
    assert night.window_s < 200 < day.window_s
    assert "at this hour of the day" in night.why
    alike = tuned(history(quick, n_rounds=72), now=78 * HOUR_S)
    assert "at all hours" in alike.why


def test_the_recent_counts_more() -> None:
    before, since = history(quick, n_rounds=48), history(slow, n_rounds=48)
    since = [replace(one, at=one.at + 30 * 24 * HOUR_S) for one in since]
    assert tuned([*before, *since], now=33 * 24 * HOUR_S).window_s > 300


def test_tiers_count_as_they_wait_now() -> None:
    observations = history(quick, tier="phone") + history(slow, tier="tablet")
    phones, tablets = (tuned(observations, waiting={tier: 50}) for tier in ("phone", "tablet"))
    assert phones.window_s < 200 < tablets.window_s


def test_times_of_a_model_of_another_size_count_little() -> None:
    small = history(quick)
    large = [replace(one, model_bytes=100_000) for one in history(slow)]
    like_small, like_large = (tuned([*small, *large], model_bytes=n_bytes) for n_bytes in (1000, 100_000))
    assert like_small.window_s < 200
    assert like_large.window_s > 300
    for one in (like_small, like_large):
        assert one.why.startswith("from 598 clients at all hours: "), "only the 600 clients with a model of that size"


def test_no_more_are_asked_than_there_are() -> None:
    observations = history(quick, lost=0.4)
    assert tuned(observations).over_selection > 1.5
    assert tuned(observations, population=24).over_selection == pytest.approx(24 / 20)
    assert tuned(observations, population=3).over_selection == 1.0


# --- in the run file --------------------------------------------------------------------------------------------------


def test_only_a_run_that_asks_for_it_is_tuned_and_its_own_window_is_the_longest() -> None:
    rounds = RoundsSection(20, 20, 15, window_s=600.0)
    evidence, now = TuningFacts(history(quick)), 21 * HOUR_S
    plain = RunFile("r", rounds)
    assert next_plan(plain, 5, 1, evidence, now) == plain.round_plan(5, 1)
    file = RunFile(
        "r", replace(rounds, self_tuning=True, window_min_s=550.0), override=(Override(6, 6, window_s=580.0),)
    )
    plan = next_plan(file, 5, 1, evidence, now)
    assert (plan.window_s, plan.number, plan.target) == (550.0, 5, 20)
    assert plan.tuned.startswith("from ")
    assert next_plan(file, 6, 2, evidence, now).window_s == 580.0
    assert next_plan(file, 5, 1, NOTHING_KNOWN, now).tuned == "as the run file says: no report times are known yet"


def test_ten_thousand_observations_take_a_moment() -> None:
    rng = np.random.default_rng(0)
    observations = [Observation(i * 10.0, "ab"[i % 2], 1000, Seen.REPORTED, slow(rng)) for i in range(OBSERVATIONS_MAX)]
    plan = replace(PLAN, target=256, minimum=200)
    took = []
    for _ in range(3):
        began = time.process_time()
        tune(plan, 0.0, TuningFacts(observations, 1000, 10_000, {"a": 1}), 1e5)
        took.append(time.process_time() - began)
    assert min(took) < 0.5  # of the processor's time, some 25 ms; the rest is for a slow one
