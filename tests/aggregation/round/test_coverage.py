"""What must be in before a round closes, told by examples; `test_round_machine.py` has the laws."""

from dataclasses import replace
from typing import Any

import pytest

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.cohort import Member, PassedOver
from umbel.aggregation.round.coverage import Gap, Roll, Samples, gaps, names, words
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import (
    Abandoned,
    Closing,
    Commit,
    Committed,
    Declined,
    Gathered,
    Recruiting,
    Release,
    Reported,
    RoundState,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId, RunId

PLAN = RoundPlan(RunId("demo"), 1, 1, 2, 1, 2.0, 60.0, Weighting.SAMPLES, 1000, 64.0, seed=7)
A, B, C, D = (ClientId(name) for name in "abcd")
NOWHERE = ClientId("nowhere")
COHORT = {A: Member(1, 100, "ward"), B: Member(1, 100, "ward"), C: Member(1, 300, "lab"), D: Member(1, 500, "lab")}
WORK = WorkDone(10, 1, 1, "0" * 64)


def training(**floor: Any) -> Training:
    return Training(replace(PLAN, coverage=CoverageFloor(**floor)), COHORT, opened_at=0.0)


def after(state: RoundState, *reporters: ClientId, at: float = 1.0) -> RoundState:
    for client in reporters:
        state, _ = advance(state, Reported(at, client, WORK))
    return state


def roll(floor: CoverageFloor, accepted: tuple[ClientId, ...] = (), **missing: str) -> Roll:
    return Roll(
        replace(PLAN, target=8, coverage=floor),
        COHORT,
        accepted,
        {ClientId(name): why for name, why in missing.items()},
    )


# --- the floor holds the round open -----------------------------------------------------------------------------------


def test_without_a_floor_the_target_closes_the_round() -> None:
    assert isinstance(after(training(), A, B), Closing)


def test_the_target_does_not_close_a_round_without_a_named_site() -> None:
    state = after(training(sites=(D,)), A, B, C)
    assert isinstance(state, Training)
    closed, commands = advance(state, Reported(2.0, D, WORK))
    assert isinstance(closed, Closing)
    assert closed.aggregate.clients == (A, B, C, D), "who came while the round waited counts"
    assert commands[-1] == Commit()
    assert (closed.reason, closed.late) == ("the target of 2 reports is in", Outcome.SURPLUS)


def test_the_target_does_not_close_a_round_without_its_share_of_samples() -> None:
    state = after(training(samples=0.5), A, B)  # 200 of 1000
    assert isinstance(state, Training)
    assert isinstance(after(state, C), Closing)  # 500 of 1000


def test_a_named_tier_needs_one_client_and_its_share_of_the_tiers_samples() -> None:
    assert isinstance(after(training(tiers=("lab",)), A, B), Training)
    assert isinstance(after(training(tiers=("lab",)), A, C), Closing)
    half = training(tiers=("lab",), samples=0.5)
    assert isinstance(after(half, A, B, C), Training)  # 300 of the tier's 800
    assert isinstance(after(half, A, B, D), Closing)


def test_a_floor_does_not_close_a_round_below_its_target() -> None:
    assert isinstance(after(training(sites=(D,)), D), Training)


def test_a_site_that_declines_is_not_waited_for() -> None:
    state = after(training(sites=(D,)), A, B)
    closed, commands = advance(state, Declined(2.0, D, "low battery"))
    assert isinstance(closed, Closing)
    assert closed.reason == "the target of 2 reports is in; not covered: site d"
    assert commands == (Release((C,), closed.reason), Commit())
    assert closed.missing == {C: "had not reported: the target of 2 reports is in", D: "low battery"}


def test_a_site_that_was_not_there_is_not_waited_for() -> None:
    closed = after(training(sites=(NOWHERE,)), A, B)
    assert isinstance(closed, Closing)
    assert closed.reason == "the target of 2 reports is in; not covered: site nowhere"


def test_a_tier_whose_clients_have_all_declined_is_not_waited_for() -> None:
    state: RoundState = replace(training(tiers=("lab",)), cohort={**COHORT, ClientId("e"): Member(1, 100, "ward")})
    for client in (C, D):
        state, _ = advance(state, Declined(1.0, client, "low battery"))
    closed = after(state, A, B)
    assert isinstance(closed, Closing)
    assert closed.reason == "the target of 2 reports is in; not covered: tier lab"


def test_a_share_that_is_out_of_reach_is_not_waited_for() -> None:
    state, _ = advance(training(samples=0.6), Declined(1.0, D, "low battery"))
    assert isinstance(after(state, A, B), Closing)


def test_at_the_windows_end_the_round_closes_without_what_is_missing() -> None:
    closed, _ = advance(after(training(sites=(D,)), A, B), Tick(60.0))
    assert isinstance(closed, Closing)
    assert closed.reason == "the window of 60 s is over with 2 reports; not covered: site d"
    assert closed.late is Outcome.LATE


# --- a strict floor ---------------------------------------------------------------------------------------------------


def test_a_strict_floor_abandons_the_round_at_the_windows_end() -> None:
    ended, _ = advance(after(training(sites=(D,), strict=True), A, B), Tick(60.0))
    assert isinstance(ended, Abandoned)
    assert ended.reason == "strict coverage is not met at the window's end: site d (has not reported yet)"


def test_a_strict_floor_that_cannot_be_met_abandons_the_round_at_once() -> None:
    ended, _ = advance(training(sites=(D,), strict=True), Declined(1.0, D, "low battery"))
    assert isinstance(ended, Abandoned)
    assert ended.reason == "strict coverage cannot be met: site d (low battery)"


def test_a_strict_floor_that_is_met_closes_as_any_other() -> None:
    assert isinstance(after(training(sites=(D,), strict=True), A, D), Closing)


def test_a_round_whose_floor_is_strict_begins_when_all_that_is_named_waits() -> None:
    plan = replace(PLAN, coverage=CoverageFloor(sites=(D,), tiers=("lab",), strict=True))
    others = tuple(Candidate(client, 10, "ward") for client in (A, B, C))
    state, commands = advance(Recruiting(plan, since=0.0), Gathered(1e6, others))
    assert isinstance(state, Recruiting)
    assert state.why == "3 clients wait, but strict coverage also needs site d, tier lab"
    assert commands == ()
    state, _ = advance(state, Gathered(1e6, (*others, Candidate(D, 10, "lab"))))
    assert isinstance(state, Training)


# --- what is told -----------------------------------------------------------------------------------------------------


def test_each_gap_says_what_is_missing_why_and_how_much_data_that_is() -> None:
    floor = CoverageFloor(0.9, (B, D, NOWHERE), ("lab", "ward", "moon"))
    assert gaps(roll(floor, (A,), d="low battery")) == (
        Gap("samples", "", "100 of 1000 samples are in, 10% of at least 90%", 900),
        Gap("site", "b", "has not reported yet", 100, may_close=True),
        Gap("site", "d", "low battery", 500),
        Gap("site", "nowhere", "was not waiting when the cohort was drawn", 0),
        Gap("tier", "lab", "none of its 2 clients is in", 800),
        Gap("tier", "ward", "100 of 200 samples are in, 50% of at least 90%", 100, may_close=True),
        Gap("tier", "moon", "no client of it was waiting when the cohort was drawn", 0),
    )


def test_who_is_in_leaves_no_gap() -> None:
    assert gaps(roll(CoverageFloor(1.0, (A,), ("lab",)), (A, B, C, D))) == ()
    assert gaps(roll(CoverageFloor())) == ()


def test_a_boast_is_worth_no_more_than_the_maximum() -> None:
    boast = {A: Member(1, 1000), B: Member(1, 1 << 40)}
    samples = Roll(PLAN, boast, (A,), {}).samples()
    assert (samples.selected, samples.reported, samples.open, samples.share) == (2000, 1000, 1000, 0.5)


def test_a_share_is_reached_whatever_binary_fractions_say() -> None:
    tenths = {ClientId(f"c{i}"): Member(1, 1) for i in range(10)}
    floor = replace(PLAN, coverage=CoverageFloor(samples=0.3))
    assert gaps(Roll(floor, tenths, [ClientId(f"c{i}") for i in range(3)], {})) == ()


def test_an_empty_cohort_covers_nothing() -> None:
    samples = Roll(PLAN, {}, (), {}).samples()
    assert (samples.selected, samples.left_out, samples.share) == (0, 0, 0.0)


def test_of_many_gaps_a_sentence_names_a_few() -> None:
    many = [Gap("site", f"s{i}", "why", 0) for i in range(7)]
    assert names(many) == "site s0, site s1, site s2, site s3, site s4 and 2 more"
    assert words(many[:1]) == "site s0 (why)"


def test_those_who_were_not_drawn_are_counted_through_to_the_end() -> None:
    waiting = tuple(Candidate(ClientId(f"c{i}"), 10 + i) for i in range(6))
    state, _ = advance(Recruiting(PLAN, since=0.0), Gathered(0.0, waiting))
    assert isinstance(state, Training)
    rest = [one.sample_count for one in waiting if one.client not in state.cohort]
    expected = PassedOver(2, sum(rest))
    assert state.passed_over == expected
    closed = after(state, *state.cohort)
    assert isinstance(closed, Closing)
    assert closed.passed_over == expected
    ended, _ = advance(state, Tick(60.0))
    assert isinstance(ended, Abandoned)
    assert ended.passed_over == expected
    assert not isinstance(ended, Committed)


@pytest.mark.parametrize(
    ("floor", "message"),
    [
        ({"samples": 1.1}, "between 0 and 1"),
        ({"samples": float("nan")}, "between 0 and 1"),
        ({"sites": ("no such site",)}, "a site must be"),
        ({"tiers": ("a", "a")}, "name a tier only once"),
        ({"strict": True}, "needs samples, sites or tiers"),
    ],
)
def test_a_floor_that_makes_no_sense_is_refused(floor: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoverageFloor(**floor)


def test_a_plan_cannot_name_more_than_its_target() -> None:
    with pytest.raises(ValueError, match="names 3 sites and tiers, more than the target of 2"):
        replace(PLAN, coverage=CoverageFloor(sites=(A, B), tiers=("lab",)))


@pytest.mark.parametrize(("selected", "share"), [(10, 0.9), (1000, 0.7), (3, 1 / 3)])
def test_a_share_that_is_met_exactly_is_met_however_floats_round(selected: int, share: float) -> None:
    exactly = round(selected * share)
    for n_in in range(exactly + 1):
        still_open = exactly - n_in
        assert Samples(selected, n_in, still_open).may_reach(share)
        assert not Samples(selected, n_in, still_open - 1).may_reach(share)
    assert Samples(selected, exactly, 0).reaches(share)
    assert not Samples(selected, exactly - 1, 1).reaches(share)
