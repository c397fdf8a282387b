"""The round, told by examples for both weightings; `test_round_machine.py` has the laws."""

import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.machine import advance, next_deadline
from umbel.aggregation.round.states import (
    Abandoned,
    Answer,
    Applied,
    Closing,
    Command,
    Commit,
    Committed,
    Declined,
    Discard,
    Event,
    Fold,
    Gathered,
    Invite,
    Outage,
    Recruiting,
    Release,
    Reported,
    RoundState,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId, RunId

PLAN = RoundPlan(
    run=RunId("demo"),
    number=3,
    attempt=1,
    target=2,
    minimum=1,
    over_selection=1.5,
    window_s=60.0,
    weighting=Weighting.SAMPLES,
    sample_count_max=1000,
    max_abs=64.0,
    seed=7,
)
A, B, C, D = (ClientId(name) for name in "abcd")
STATES: TypeAdapter[RoundState] = TypeAdapter(RoundState)


def work(sample_count: int = 10, steps_done: int = 5) -> WorkDone:
    return WorkDone(sample_count, steps_done, 5, "0" * 64)


def after(state: RoundState, *events: Event) -> tuple[RoundState, list[Command]]:
    """The state after all events, and the commands of all of them."""
    commands: list[Command] = []
    for event in events:
        state, new = advance(state, event)
        commands += new
    return state, commands


def training(plan: RoundPlan = PLAN, clients: str = "abc") -> Training:
    candidates = tuple(Candidate(ClientId(name), 10) for name in clients)
    state, _ = advance(Recruiting(plan, since=0.0), Gathered(100.0, candidates))
    assert isinstance(state, Training)
    return state


def ended(plan: RoundPlan = PLAN) -> dict[str, RoundState]:
    """One state of each phase that hears reports too late; `a` and `b` were accepted, `c` was not."""
    closing, _ = after(training(plan), Reported(101, A, work()), Reported(102, B, work()))
    assert isinstance(closing, Closing)
    stopped, _ = after(training(plan), Reported(101, A, work()), Stopped(102, "enough"))
    return {"closing": closing, "committed": Committed(closing, "f" * 64), "abandoned": stopped}


# --- a round that goes well -------------------------------------------------------------------------------------------


def test_a_round_by_sample_counts() -> None:
    state: RoundState = Recruiting(PLAN, since=0.0)
    state, commands = advance(state, Gathered(1.0, (Candidate(A, 10),)))
    why = "waiting for clients: 1 of 3 here; starting with these in at most 5.0 s"
    assert (state, commands) == (Recruiting(PLAN, 0.0, why), ())
    state, commands = advance(state, Gathered(2.0, (Candidate(A, 10), Candidate(B, 20), Candidate(C, 30))))
    assert commands == (Invite((A, B, C)),)
    state, commands = advance(state, Reported(10.0, B, work(sample_count=20)))
    assert commands == (Fold(B, weight=20), Answer(B, Outcome.ACCEPTED, "the report counts"))
    state, commands = advance(state, Reported(11.0, A, work(sample_count=10, steps_done=3)))
    reason = "the target of 2 reports is in"
    assert commands == (
        Fold(A, weight=10),
        Answer(A, Outcome.ACCEPTED, "the report counts"),
        Release((C,), reason),
        Commit(),
    )
    assert isinstance(state, Closing)
    assert (state.opened_at, state.closed_at, state.reason) == (2.0, 11.0, reason)
    assert state.missing == {C: f"had not reported: {reason}"}
    aggregate = state.aggregate
    assert (aggregate.clients, aggregate.total_weight, aggregate.sample_count, aggregate.n_partial) == (
        (A, B),
        30,
        30,
        1,
    )
    state, commands = advance(state, Applied(12.0, "f" * 64))
    assert isinstance(state, Committed)
    assert (state.model_sha256, commands) == ("f" * 64, ())


def test_a_round_by_draws() -> None:
    """One client is drawn for both reports that are wanted: it trains once, weighs two and closes the round."""
    plan = replace(PLAN, weighting=Weighting.PROPORTIONAL)
    state = Training(plan, {A: Member(2, 10), B: Member(1, 10)}, opened_at=0.0)
    closing, commands = advance(state, Reported(1.0, A, work(sample_count=999)))
    assert commands[0] == Fold(A, weight=2)
    assert isinstance(closing, Closing)
    assert (closing.aggregate.total_weight, closing.aggregate.sample_count) == (2, 999)
    still, commands = advance(state, Reported(1.0, B, work(sample_count=999)))
    assert isinstance(still, Training)
    assert (commands[0], still.n_reported, still.n_open) == (Fold(B, weight=1), 1, 1)


def test_the_target_in_draws_does_not_close_a_round_below_the_minimum_of_clients() -> None:
    plan = replace(PLAN, weighting=Weighting.PROPORTIONAL, minimum=2)
    state, commands = advance(
        Training(plan, {A: Member(2, 10), B: Member(1, 10)}, opened_at=0.0), Reported(1.0, A, work())
    )
    assert isinstance(state, Training)
    assert Commit() not in commands
    alone, _ = advance(state, Tick(60.0))
    assert isinstance(alone, Abandoned)
    assert alone.reason == "the window of 60 s is over with 1 of at least 2 reports"
    together, _ = advance(state, Reported(2.0, B, work()))
    assert isinstance(together, Closing)


def test_a_cohort_of_one() -> None:
    plan = replace(PLAN, target=1, over_selection=1.0)
    state, commands = after(training(plan, "a"), Reported(101, A, work()))
    assert isinstance(state, Closing)
    assert state.reason == "the target of 1 report is in"
    assert commands == [Fold(A, 10), Answer(A, Outcome.ACCEPTED, "the report counts"), Commit()]  # nobody to release


# --- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("now", "phase"), [(159.999, "training"), (160.0, "closing"), (9999.0, "closing")])
def test_at_the_end_of_the_window_the_minimum_closes_the_round(now: float, phase: str) -> None:
    state, _ = after(training(), Reported(101, A, work()), Tick(now))
    assert state.phase == phase
    if isinstance(state, Closing):
        assert (state.late, state.reason) == (Outcome.LATE, "the window of 60 s is over with 1 report")


def test_at_the_end_of_the_window_too_few_reports_abandon_the_round() -> None:
    state, commands = after(training(replace(PLAN, minimum=2)), Reported(101, A, work()), Tick(160))
    assert isinstance(state, Abandoned)
    assert state.reason == "the window of 60 s is over with 1 of at least 2 reports"
    assert commands[-2:] == [Release((B, C), state.reason), Discard(state.reason)]
    assert set(state.missing) == {B, C}


def test_a_report_at_the_end_of_the_window_is_late_even_if_no_tick_came_first() -> None:
    state, commands = after(training(), Reported(101, A, work()), Reported(160, B, work()))
    assert isinstance(state, Closing)
    assert commands[-1] == Answer(
        B, Outcome.LATE, "this report came after the round had closed: the window of 60 s is over with 1 report"
    )
    assert commands[2:4] == [Release((B, C), "the window of 60 s is over with 1 report"), Commit()]
    assert Fold(B, 10) not in commands


def test_the_window_does_not_count_the_time_in_which_nobody_could_take_reports() -> None:
    state, _ = after(training(), Reported(101, A, work()), Outage(110, 150), Outage(90, 152), Outage(150, 151))
    assert isinstance(state, Training)
    assert (state.closes_at, state.away_s) == (202, 42), "each moment is counted once"
    state, _ = after(state, Outage(0, 90), Tick(201.9), Reported(201.9, B, work()), Tick(202))
    assert isinstance(state, Closing)
    assert set(state.accepted) == {A, B}
    assert state.away_s == 42


def test_what_was_open_when_nobody_was_there_counts_from_its_opening() -> None:
    state, _ = after(training(replace(PLAN, minimum=2)), Outage(20, 130), Tick(189))
    assert isinstance(state, Training)
    state, _ = after(state, Tick(190))
    assert isinstance(state, Abandoned)
    assert "the window of 60 s, beside 30 s in which no coordinator could take reports, is over" in state.reason


def test_a_late_report_that_finds_too_few_others_is_abandoned_with_the_round() -> None:
    state, commands = after(training(), Reported(160, A, work()))
    assert isinstance(state, Abandoned)
    assert commands[-1] == Answer(
        A, Outcome.ABANDONED, "the round was abandoned: the window of 60 s is over with 0 of at least 1 report"
    )


def test_a_round_below_its_target_closes_when_nobody_is_left() -> None:
    plan = replace(PLAN, target=3, over_selection=1.0)
    state, _ = after(
        training(plan), Reported(101, A, work()), Declined(102, B, "low battery"), Declined(103, C, "busy")
    )
    assert isinstance(state, Closing)
    assert (state.late, state.reason) == (Outcome.LATE, "1 report is in and nobody is left to wait for")
    assert state.missing == {B: "low battery", C: "busy"}


def test_a_short_cohort_that_has_all_reported_closes_at_once() -> None:
    plan = replace(PLAN, target=3)
    state, _ = after(training(plan, "ab"), Reported(101, A, work()), Reported(102, B, work()))
    assert isinstance(state, Closing)
    assert (state.late, state.reason) == (Outcome.LATE, "2 reports are in and nobody is left to wait for")


def test_a_round_that_everyone_declined_is_abandoned_at_once() -> None:
    state, commands = after(training(), *(Declined(101, c, "busy") for c in (A, B, C)))
    assert isinstance(state, Abandoned)
    assert state.reason == "everyone who is left has declined, with 0 of at least 1 report; declined by a, b, c"
    assert commands == [Discard(state.reason)]


def test_a_report_after_which_too_few_are_left_hears_that_the_round_is_abandoned() -> None:
    state, _ = after(training(replace(PLAN, minimum=2), "ab"), Declined(101, B, "busy"))
    abandoned, commands = advance(state, Reported(102, A, work()))
    assert isinstance(abandoned, Abandoned)
    told = Answer(A, Outcome.ABANDONED, f"the round was abandoned: {abandoned.reason}")
    assert commands == (Fold(A, 10), Discard(abandoned.reason), told)
    assert advance(abandoned, Reported(103, A, work())) == (abandoned, (told,))


def test_time_that_runs_backward_closes_nothing_and_opens_nothing_earlier() -> None:
    state, _ = after(training(), Tick(50), Reported(20, A, work()))
    assert isinstance(state, Training)
    closing, _ = advance(state, Reported(10, B, work()))
    assert isinstance(closing, Closing)
    assert closing.closed_at == closing.opened_at == 100
    opened, _ = advance(Recruiting(PLAN, since=50.0), Gathered(40.0, tuple(Candidate(c, 1) for c in (A, B, C))))
    assert isinstance(opened, Training)
    assert opened.opened_at == 50
    stopped, _ = advance(Recruiting(PLAN, since=50.0), Stopped(40.0, "enough"))
    assert isinstance(stopped, Abandoned)
    assert stopped.closed_at == 50


# --- twice, late, uninvited -------------------------------------------------------------------------------------------


def test_a_report_sent_twice_counts_once_and_gets_the_same_answer() -> None:
    once, first = advance(training(), Reported(101, A, work(sample_count=10)))
    twice, second = advance(once, Reported(102, A, work(sample_count=500)))
    assert twice == once
    assert second == (first[1],)


def test_after_the_end_the_accepted_hear_the_same_answer_and_the_others_why_not() -> None:
    for phase in ("closing", "committed"):
        state = ended()[phase]
        same, commands = after(state, *(Reported(999, client, work()) for client in (A, C, D)))
        assert same == state
        assert commands == [
            Answer(A, Outcome.ACCEPTED, "the report counts"),
            Answer(C, Outcome.SURPLUS, "this report came after the round had closed: the target of 2 reports is in"),
            Answer(D, Outcome.SURPLUS, "this client is not in the round's cohort"),
        ]


def test_in_an_abandoned_round_nobody_counts() -> None:
    state = ended()["abandoned"]
    same, commands = after(state, *(Reported(999, client, work()) for client in (A, C, D)))
    assert same == state
    reason = "the round was abandoned: enough"
    assert commands == [
        Answer(A, Outcome.ABANDONED, reason),
        Answer(C, Outcome.ABANDONED, reason),
        Answer(D, Outcome.SURPLUS, "this client is not in the round's cohort"),
    ]


@pytest.mark.parametrize("state", [Recruiting(PLAN, 0.0), training()], ids=["recruiting", "training"])
def test_an_uninvited_report_is_answered_and_changes_nothing(state: RoundState) -> None:
    same, commands = advance(state, Reported(101, D, work()))
    assert same == state
    assert commands == (Answer(D, Outcome.SURPLUS, "this client is not in the round's cohort"),)


def test_who_declined_may_still_change_its_mind() -> None:
    state, commands = after(training(), Declined(101, A, "busy"), Reported(102, A, work()))
    assert isinstance(state, Training)
    assert (set(state.accepted), state.declined) == ({A}, {})
    assert commands[0] == Fold(A, 10)


def test_a_decline_after_the_report_or_from_a_stranger_changes_nothing() -> None:
    state, _ = advance(training(), Reported(101, A, work()))
    assert after(state, Declined(102, A, "busy"), Declined(102, D, "busy")) == (state, [])


def test_who_declines_twice_has_declined_for_its_first_reason() -> None:
    state, _ = advance(training(), Declined(101, A, "busy"))
    assert after(state, Declined(102, A, "on battery")) == (state, [])


def test_who_declined_is_not_told_to_stop() -> None:
    _, commands = after(training(), Declined(101, C, "busy"), Stopped(102, "enough"))
    assert commands == [Release((A, B), "enough"), Discard("enough")]


# --- stop and restart -------------------------------------------------------------------------------------------------


def test_a_stop_ends_a_round_that_has_not_closed() -> None:
    state, commands = after(Recruiting(PLAN, 0.0), Stopped(5.0, "enough"))
    assert (state, commands) == (Abandoned(PLAN, "enough", {}, {}, {}, 5.0, 5.0), [Discard("enough")])
    state, _ = after(training(), Reported(101, A, work()), Stopped(102, "enough"))
    assert isinstance(state, Abandoned)
    assert (set(state.accepted), set(state.missing)) == ({A}, {B, C})


@pytest.mark.parametrize("phase", ["closing", "committed", "abandoned"])
def test_nothing_undoes_an_end(phase: str) -> None:
    state = ended()[phase]
    events: list[Event] = [Stopped(999, "no"), Tick(999), Gathered(999, ()), Declined(999, C, "busy")]
    if phase != "closing":
        events.append(Applied(999, "0" * 64))
    assert after(state, *events) == (state, [])


def test_a_model_applied_before_the_round_has_closed_is_no_event_of_it() -> None:
    for state in (Recruiting(PLAN, 0.0), training()):
        assert advance(state, Applied(101, "0" * 64)) == (state, ())
    assert advance(training(), Gathered(101, ())) == (training(), ())
    assert advance(Recruiting(PLAN, 0.0), Tick(5)) == (Recruiting(PLAN, 0.0), ())


def test_the_next_deadline_is_the_end_of_patience_then_of_the_window() -> None:
    assert next_deadline(Recruiting(PLAN, since=10.0)) == 16
    assert next_deadline(training()) == 160
    assert [next_deadline(state) for state in ended().values()] == [None] * 3


@pytest.mark.parametrize("weighting", Weighting)
def test_every_state_survives_being_stored_as_json(weighting: Weighting) -> None:
    plan = replace(PLAN, weighting=weighting, target=3)
    middle, _ = after(training(plan), Reported(101.5, A, work(steps_done=3)), Declined(102, B, "low battery"))
    stored = middle
    if isinstance(middle, Training):
        stored = replace(middle, accepted=dict(middle.accepted), declined=dict(middle.declined))
    assert stored == middle
    for state in (Recruiting(plan, 0.25), training(plan), stored, *ended().values()):
        text = STATES.dump_json(state)
        again = STATES.validate_json(text)
        assert again == state
        assert type(again) is type(state)
        assert json.loads(text)["phase"] == state.phase
        event = Reported(103, C, work())
        assert advance(again, event) == advance(state, event)
