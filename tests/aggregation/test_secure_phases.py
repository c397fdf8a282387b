"""The phases of a secure round, told by examples; `test_round_machine.py` has the laws."""

from dataclasses import replace

import pytest

from umbel.aggregation.advance import advance, next_deadline
from umbel.aggregation.messages import Outcome
from umbel.aggregation.round import (
    Abandoned,
    Announce,
    Answer,
    Applied,
    Closing,
    Command,
    Commit,
    Committed,
    Declined,
    Event,
    Gathered,
    Outage,
    Recruiting,
    Release,
    Reported,
    RoundState,
    Spoke,
    Tick,
    Training,
)
from umbel.aggregation.secagg.plan import SecurePlan
from umbel.aggregation.secagg.server import Exchange, Phase
from umbel.aggregation.types import ClientId, CoverageFloor, RoundPlan, RunId, Weighting, WorkDone
from umbel.aggregation.weighting import Candidate

NAMES = tuple(ClientId(name) for name in "abcde")
PLAN = RoundPlan(
    RunId("ward"), 1, 1, 5, 3, 1.0, 100.0, Weighting.SAMPLES, 1000, 64.0, seed=7, secure=SecurePlan(16, 10, 5)
)
WORK = WorkDone(1, 1, 1, "0" * 64)


def after(state: RoundState, *events: Event) -> tuple[RoundState, list[Command]]:
    commands: list[Command] = []
    for event in events:
        state, more = advance(state, event)
        commands += more
    return state, commands


def drawn(plan: RoundPlan = PLAN) -> RoundState:
    candidates = tuple(Candidate(name, 10) for name in NAMES)
    return after(Recruiting(plan, 0.0), Gathered(0.0, candidates, bytes(48)))[0]


def said(phase: Phase, now: float, names: tuple[ClientId, ...] = NAMES) -> list[Event]:
    return [Spoke(now, name, phase, "word") for name in names]


def closed(now: float = 50.0) -> Closing:
    reports = [Reported(now, name, WORK) for name in NAMES]
    state, _ = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0), *said(Phase.SHARE_KEYS, 2.0), *reports)
    assert isinstance(state, Closing)
    return state


def exchange_of(state: RoundState) -> Exchange:
    assert isinstance(state, Training | Closing)
    assert state.exchange is not None
    return state.exchange


def test_a_round_in_which_everybody_keeps_pace() -> None:
    state, commands = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0))
    assert commands == [Announce(NAMES)]
    state, commands = after(state, *said(Phase.SHARE_KEYS, 2.0))
    assert commands == [Announce(NAMES)]
    state, commands = after(state, *[Reported(50.0, name, WORK) for name in NAMES])
    assert commands[-1] == Announce(NAMES)
    assert not isinstance(commands[-2], Commit)
    state, commands = after(state, *said(Phase.CONSISTENCY_CHECK, 51.0))
    assert commands == [Announce(NAMES), Commit()]
    state, _ = after(state, Applied(52.0, "f" * 64))
    assert isinstance(state, Committed)
    assert state.closing.aggregate.total_weight == 5, "each update carries its weight itself"


def test_who_is_late_for_a_phase_is_out_and_told_so() -> None:
    state, commands = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0, NAMES[:4]), Tick(20.0))
    reason = "this client has not advertised keys in time"
    assert commands == [Release(NAMES[4:], reason), Announce(NAMES[:4])]
    state, commands = after(state, *said(Phase.SHARE_KEYS, 21.0, NAMES[:3]), Tick(40.0))
    assert exchange_of(state).masked == NAMES[:3]
    for name in NAMES[3:]:
        _, (answer,) = advance(state, Reported(50.0, name, WORK))
        assert isinstance(answer, Answer)
        assert answer.outcome is Outcome.SURPLUS
        assert "shared no keys" in answer.reason


def test_a_report_after_a_window_in_which_nobody_ticked_ends_the_round() -> None:
    """The keys were in, but their phase was never settled; there is no time left for another."""
    waiting, _ = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0, NAMES[:4]))
    state, commands = after(waiting, Reported(100.0, NAMES[0], WORK))
    assert isinstance(state, Abandoned)
    assert state.reason == "the window of 100 s is over, and clients have not all advertised keys"
    assert isinstance(commands[-1], Answer)
    assert commands[-1].outcome is Outcome.ABANDONED


def test_no_phase_is_due_after_the_windows_end() -> None:
    state, _ = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0, NAMES[:4]), Tick(95.0))
    assert exchange_of(state).phase is Phase.SHARE_KEYS
    assert next_deadline(state) == 100.0


def test_strict_coverage_that_is_out_of_reach_is_seen_while_keys_are_exchanged() -> None:
    plan = replace(PLAN, coverage=CoverageFloor(sites=NAMES[:1], strict=True))
    state, _ = after(drawn(plan), Declined(1.0, NAMES[0], "low battery"))
    assert isinstance(state, Abandoned)
    assert "strict coverage cannot be met" in state.reason


@pytest.mark.parametrize("n_told", [1, 2])
def test_an_outage_after_the_window_counts_once(n_told: int) -> None:
    state, _ = after(closed(), *[Outage(55.0, 85.0)] * n_told)
    assert next_deadline(state) == 50.0 + 50.0 + 30.0


def test_overlapping_outages_of_two_coordinators_count_once() -> None:
    state, _ = after(closed(), Outage(55.0, 85.0), Outage(60.0, 90.0))
    assert next_deadline(state) == 50.0 + 50.0 + 35.0


def test_a_model_before_the_sum_is_opened_is_nobodys() -> None:
    assert after(closed(), Applied(51.0, "f" * 64)) == (closed(), [])


def test_a_phase_begins_after_the_one_before_it_whatever_the_clock_says() -> None:
    state, _ = after(closed(), *said(Phase.CONSISTENCY_CHECK, 3.0))
    assert exchange_of(state).phase is Phase.UNMASKING
    assert exchange_of(state).began_at == 50.0


def test_once_enough_have_signed_the_others_are_not_waited_for_long() -> None:
    """t is 4 of 5. They took 2 s, so the fifth has 6 s more; not the rest of 50 s."""
    state, _ = after(closed(), *said(Phase.CONSISTENCY_CHECK, 52.0, NAMES[:4]))
    assert next_deadline(state) == 58.0
    state, commands = after(state, Tick(58.0))
    assert commands == [Announce(NAMES[:4]), Commit()]


def test_below_the_threshold_no_sum_is_opened() -> None:
    state, commands = after(closed(), *said(Phase.CONSISTENCY_CHECK, 52.0, NAMES[:3]), Tick(100.0))
    assert isinstance(state, Abandoned)
    assert state.reason == "3 of at least 4 clients have signed who is in the sum in time"
    assert not any(isinstance(command, Commit) for command in commands)
