"""What follows an abandoned attempt."""

from dataclasses import replace

import pytest

from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.machine import advance, next_deadline
from umbel.aggregation.round.retry import (
    AVOIDED_MAX,
    DECLINED_ATTEMPTS_MAX,
    gives_up,
    needs_a_person,
    next_attempt,
    retry_pause_s,
)
from umbel.aggregation.round.states import (
    Abandoned,
    Closing,
    Declined,
    Gathered,
    Recruiting,
    Reported,
    RoundState,
    SecureEnd,
    Spoiled,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId, RunId

PLAN = RoundPlan(RunId("demo"), 3, 1, 2, 2, 1.5, 60.0, Weighting.SAMPLES, 1000, 64.0, seed=7)
A, B, C = (ClientId(name) for name in "abc")
WORK = WorkDone(10, 1, 1, "0" * 64)


def failed(plan: RoundPlan = PLAN) -> Abandoned:
    """`a` reported, `b` declined, `c` fell silent."""
    state: RoundState = Training(plan, {client: Member(1, 10) for client in (A, B, C)}, opened_at=0.0)
    for event in (Reported(1.0, A, WORK), Declined(2.0, B, "low battery"), Tick(60.0)):
        state, _ = advance(state, event)
    assert isinstance(state, Abandoned)
    return state


def waiting(n: int) -> tuple[Candidate, ...]:
    return (Candidate(A, 10), Candidate(B, 10), Candidate(C, 10), *(Candidate(ClientId(f"n{i}"), 10) for i in range(n)))


def test_the_second_attempt_follows_at_once_and_asks_others_first() -> None:
    state = next_attempt(failed(), replace(PLAN, attempt=2), now=61.0)
    assert (state.avoid, state.not_before) == ((B, C), 61.0)
    opened, _ = advance(state, Gathered(61.0, waiting(2)))
    assert isinstance(opened, Training)
    assert set(opened.cohort) == {A, "n0", "n1"}


def test_those_who_failed_fill_what_the_others_leave() -> None:
    state = next_attempt(failed(), replace(PLAN, attempt=2), now=61.0)
    opened, _ = advance(state, Gathered(61.0, waiting(1)))
    assert isinstance(opened, Training)
    assert len(opened.cohort) == 3
    assert {A, "n0"} < set(opened.cohort)


def test_later_attempts_wait_longer_and_say_why() -> None:
    pauses = [retry_pause_s(replace(PLAN, attempt=attempt)) for attempt in range(1, 9)]
    assert pauses == [0, 0, 6, 12, 24, 48, 60, 60]
    assert retry_pause_s(replace(PLAN, attempt=10_000)) == 60
    state = next_attempt(failed(), replace(PLAN, attempt=3), now=100.0)
    assert state.why == (
        "attempt 3 begins 6.0 s after the last, which was abandoned: "
        "the window of 60 s is over with 1 of at least 2 reports; 1 client declined: low battery"
    )


def test_nobody_is_drawn_before_the_pause_is_over() -> None:
    state: RoundState = next_attempt(failed(), replace(PLAN, attempt=3), now=100.0)
    assert next_deadline(state, now=101.0) == 106.0
    same, commands = advance(state, Gathered(105.9, waiting(5)))
    assert (same, commands) == (state, ())
    opened, _ = advance(state, Gathered(106.0, waiting(5)))
    assert isinstance(opened, Training)


def test_patience_begins_when_the_pause_ends() -> None:
    state: RoundState = next_attempt(failed(), replace(PLAN, attempt=3), now=100.0)
    state, _ = advance(state, Gathered(111.0, waiting(0)[:2]))
    assert isinstance(state, Recruiting)
    assert next_deadline(state, now=111.0) == 112.0
    state, _ = advance(state, Gathered(112.0, waiting(0)[:2]))
    assert isinstance(state, Training)


def test_a_draw_with_replacement_passes_over_those_who_failed_where_it_can() -> None:
    plan = replace(PLAN, attempt=2, weighting=Weighting.PROPORTIONAL)
    state = next_attempt(failed(), plan, now=61.0)
    opened, _ = advance(state, Gathered(61.0, waiting(40)))
    assert isinstance(opened, Training)
    assert opened.cohort.keys().isdisjoint({B, C})


def test_a_named_site_is_asked_again_though_it_failed() -> None:
    plan = replace(PLAN, attempt=2, coverage=CoverageFloor(sites=(C,)))
    opened, _ = advance(next_attempt(failed(), plan, now=61.0), Gathered(61.0, waiting(9)))
    assert isinstance(opened, Training)
    assert C in opened.cohort
    assert B not in opened.cohort


def test_nobody_is_avoided_for_a_stop_or_a_spoiled_sum() -> None:
    state: RoundState = Training(PLAN, {client: Member(1, 10) for client in (A, B, C)}, opened_at=0.0)
    for client in (A, B):
        state, _ = advance(state, Reported(1.0, client, WORK))
    assert isinstance(state, Closing)
    spoiled, _ = advance(state, Spoiled(2.0, "an update is gone"))
    assert isinstance(spoiled, Abandoned)
    assert next_attempt(spoiled, replace(PLAN, attempt=2), 3.0).avoid == ()
    never_opened, _ = advance(Recruiting(PLAN, 0.0), Stopped(1.0, "enough"))
    assert isinstance(never_opened, Abandoned)
    assert next_attempt(never_opened, replace(PLAN, attempt=2), 3.0).avoid == ()


def test_who_left_a_strict_floor_unmet_is_avoided_though_the_minimum_was_in() -> None:
    plan = replace(PLAN, minimum=1, coverage=CoverageFloor(samples=1.0, strict=True))
    assert next_attempt(failed(plan), replace(plan, attempt=2), 61.0).avoid == (B, C)


def test_a_cohort_too_large_to_name_is_asked_alike() -> None:
    many = {ClientId(f"c{i}"): f"reason {i}" for i in range(AVOIDED_MAX + 1)}
    ended = Abandoned(PLAN, "why", dict.fromkeys(many, Member(1, 1)), {}, many, 0.0, 60.0)
    assert next_attempt(ended, replace(PLAN, attempt=2), 61.0).avoid == ()


def test_who_is_to_blame_is_asked_last_and_nobody_else() -> None:
    """Though `b` and `c` have not reported, and `a` has."""
    ended = replace(failed(), secure=SecureEnd(blamed={A: "it has dealt wrong shares"}))
    assert next_attempt(ended, replace(PLAN, attempt=2), 61.0).avoid == (A,)
    many = {ClientId(f"c{i}"): "it had not revealed shares in time" for i in range(AVOIDED_MAX + 1)}
    assert next_attempt(replace(ended, secure=SecureEnd(blamed=many)), replace(PLAN, attempt=2), 61.0).avoid == ()


@pytest.mark.parametrize(("attempt", "most", "is_over"), [(5, None, False), (4, 5, False), (5, 5, True), (1, 1, True)])
def test_a_run_gives_up_after_as_many_attempts_as_its_file_allows(
    attempt: int, most: int | None, is_over: bool
) -> None:
    reason = gives_up(failed(replace(PLAN, attempt=attempt)), most)
    assert (reason is not None) == is_over


def test_giving_up_says_why_in_a_sentence() -> None:
    assert str(gives_up(failed(replace(PLAN, attempt=1)), 1)).startswith("round 3 was abandoned once, and the run file")
    assert gives_up(failed(replace(PLAN, attempt=2)), 2) == (
        "round 3 was abandoned 2 times, and the run file allows no more (rounds.attempts_max); "
        "the last time because the window of 60 s is over with 1 of at least 2 reports; 1 client declined: low battery"
    )


def test_giving_up_on_clients_that_decline_has_their_most_frequent_reason() -> None:
    assert str(gives_up(declined(2, POLICY, BROKEN, POLICY), 2)).endswith(
        "with 0 of at least 2 reports; declined by a, b, c; 3 clients declined, 2 of them with this reason: " + POLICY
    )


POLICY, BROKEN = "this site takes part in rounds of five sites or more", "the client's own code failed with KeyError"


def declined(attempt: int, *reasons: str, minimum: int = 2) -> Abandoned:
    """Of three clients, the first ones declined; the window passes for the others."""
    plan = replace(PLAN, attempt=attempt, minimum=minimum)
    state: RoundState = Training(plan, {client: Member(1, 10) for client in (A, B, C)}, opened_at=0.0)
    for client, why in zip((A, B, C), reasons, strict=False):
        state, _ = advance(state, Declined(1.0, client, why))
    state, _ = advance(state, Tick(60.0))
    assert isinstance(state, Abandoned)
    return state


def test_a_round_that_clients_decline_again_and_again_needs_a_person_and_says_why() -> None:
    failed = declined(DECLINED_ATTEMPTS_MAX, POLICY, BROKEN, POLICY)
    assert needs_a_person(failed, None) == (
        "round 3 was abandoned 10 times, the last time because everyone who is left has declined, with 0 of at least 2 "
        f"reports; declined by a, b, c; 3 clients declined, 2 of them with this reason: {POLICY}. Remove the cause, "
        "then resume the run, or stop it"
    )
    assert needs_a_person(declined(DECLINED_ATTEMPTS_MAX + 1, POLICY, BROKEN), None) is not None
    assert needs_a_person(failed, 12) is None, "the run file says how often it may try"


@pytest.mark.parametrize(
    "failed",
    [
        pytest.param(declined(DECLINED_ATTEMPTS_MAX - 1, POLICY, POLICY, POLICY), id="not often enough"),
        pytest.param(declined(DECLINED_ATTEMPTS_MAX), id="all are silent: a fleet that sleeps"),
        pytest.param(declined(DECLINED_ATTEMPTS_MAX, POLICY), id="the silent ones would have been enough"),
    ],
)
def test_a_round_that_may_still_succeed_by_itself_needs_no_person(failed: Abandoned) -> None:
    assert needs_a_person(failed, None) is None


def test_in_a_secure_run_one_site_that_declines_is_enough() -> None:
    failed = Abandoned(
        replace(PLAN, attempt=DECLINED_ATTEMPTS_MAX, secure=SecurePlan(16, 1, 16, minimum=3)),
        "too few agreed",
        {client: Member(1, 10) for client in (A, B, C)},
        {},
        {},
        opened_at=0.0,
        closed_at=60.0,
        secure=SecureEnd(refused={A: POLICY}),
    )
    assert str(needs_a_person(failed, None)).endswith(
        f"1 client declined: {POLICY}. Remove the cause, then resume the run, or stop it"
    )


def test_the_next_attempt_tells_the_operator_why_clients_declined() -> None:
    state = next_attempt(declined(2, BROKEN, BROKEN), replace(PLAN, attempt=3), now=61.0)
    assert state.why.endswith(f"; 2 clients declined: {BROKEN}")
