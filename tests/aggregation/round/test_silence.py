"""A round with enough reports does not wait for silent clients; `round_laws.py` has the laws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.retry import left_out_by_themselves
from umbel.aggregation.round.silence import cut_s, is_silence, quiet_s
from umbel.aggregation.round.states import Closing, Commit, Outage, Release, Reported, Silent, Training
from umbel.aggregation.types import ClientId, RunId

PLAN = RoundPlan(
    run=RunId("demo"),
    number=1,
    attempt=1,
    target=4,
    minimum=2,
    over_selection=1.0,
    window_s=600.0,
    weighting=Weighting.SAMPLES,
    sample_count_max=1000,
    max_abs=64.0,
    seed=7,
)
A, B, C, D = (ClientId(name) for name in "abcd")


def opened(plan: RoundPlan = PLAN) -> Training:
    return Training(plan, {client: Member(1, 10) for client in (A, B, C, D)}, opened_at=0.0)


def after_reports(*clients: ClientId, state: Training | None = None) -> Training:
    state = state or opened()
    for client in clients:
        following, _ = advance(state, Reported(1.0, client, WorkDone(10, 5, 5, "0" * 64)))
        assert isinstance(following, Training)
        state = following
    return state


def test_a_round_closes_when_it_waits_only_for_silent_clients() -> None:
    state, commands = advance(after_reports(A, B, C), Silent(20.0, frozenset({D})))
    assert isinstance(state, Closing)
    assert state.reason == "3 reports are in, and d fell silent"
    assert (state.closed_at, state.late) == (20.0, Outcome.LATE)
    assert is_silence(state.missing[D])
    assert commands == (Release((D,), state.reason), Commit())


def test_a_round_waits_for_a_client_that_is_heard() -> None:
    state = after_reports(A, B)
    assert advance(state, Silent(20.0, frozenset({D}))) == (state, ())


def test_silence_abandons_no_round() -> None:
    """Below the minimum the next attempt would wait for the same clients, and the others would have worked in vain."""
    state = after_reports(A)
    assert advance(state, Silent(20.0, frozenset({B, C, D}))) == (state, ())


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_round_waits_for_strict_coverage_until_the_window_is_over(is_strict: bool) -> None:
    plan = replace(PLAN, coverage=CoverageFloor(sites=(D,), strict=is_strict))
    state, _ = advance(after_reports(A, B, state=opened(plan)), Silent(20.0, frozenset({C, D})))
    assert isinstance(state, Training if is_strict else Closing)
    if isinstance(state, Closing):
        assert state.reason == "2 reports are in, and c, d fell silent; not covered: site d"
        assert all(map(is_silence, state.missing.values()))


def test_who_falls_silent_while_a_round_with_its_target_waits_for_coverage_is_late() -> None:
    """Its report would have been wanted, so it is no surplus; and in a secure round it is to blame for its absence."""
    plan = replace(PLAN, target=3, coverage=CoverageFloor(sites=(D,)))
    waiting = after_reports(A, B, C, state=opened(plan))
    state, _ = advance(waiting, Silent(20.0, frozenset({D})))
    assert isinstance(state, Closing)
    assert (state.reason, state.late) == ("3 reports are in, and d fell silent; not covered: site d", Outcome.LATE)
    assert set(left_out_by_themselves(state)) == {D}


def test_the_report_of_a_client_that_was_silent_counts_while_the_round_is_open() -> None:
    state, _ = advance(after_reports(A), Silent(20.0, frozenset({B, C, D})))
    assert isinstance(state, Training)
    following = after_reports(B, state=state)
    assert set(following.accepted) == {A, B}


def test_after_an_outage_clients_have_time_to_return() -> None:
    state, _ = advance(after_reports(A, B, C), Outage(10.0, 100.0))
    silent = frozenset({D})
    assert isinstance(state, Training)
    assert advance(state, Silent(100.0 + cut_s(600.0) - 0.1, silent)) == (state, ())
    assert isinstance(advance(state, Silent(100.0 + cut_s(600.0), silent))[0], Closing)


@pytest.mark.parametrize(("window_s", "cut", "quiet"), [(60.0, 5.0, 30.0), (600.0, 10.0, 60.0), (3600.0, 30.0, 120.0)])
def test_the_bounds_follow_from_the_window(window_s: float, cut: float, quiet: float) -> None:
    assert (cut_s(window_s), quiet_s(window_s)) == pytest.approx((cut, quiet))


@given(window_s=st.floats(1, 1e6), gap_s=st.floats(0, 1e6))
def test_a_client_may_be_quiet_for_three_times_its_own_longest_gap(window_s: float, gap_s: float) -> None:
    assert quiet_s(window_s, gap_s) >= max(3 * gap_s, cut_s(window_s))
