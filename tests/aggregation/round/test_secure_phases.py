"""The phases of a secure round, told by examples; `test_round_machine.py` has the laws."""

from dataclasses import replace
from typing import Annotated

import pytest
from pydantic import Discriminator, TypeAdapter

from tests.aggregation.round.secure_round_laws import opened_of
from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.machine import advance, next_deadline
from umbel.aggregation.round.retry import next_attempt, sums_before
from umbel.aggregation.round.second_sum import OpenedSum
from umbel.aggregation.round.states import (
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
    Revealed,
    RoundState,
    SecureEnd,
    Silent,
    Spoiled,
    Spoke,
    Stopped,
    SumsBefore,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.types import ClientId, RunId

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


@pytest.mark.parametrize("phase", [Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS])
def test_a_phase_of_keys_does_not_wait_for_silent_clients(phase: Phase) -> None:
    state = drawn() if phase is Phase.ADVERTISE_KEYS else after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0))[0]
    state, _ = after(state, *said(phase, 2.0, NAMES[:3]))
    assert after(state, Silent(8.0, frozenset(NAMES[3:4]))) == (state, []), "e is not silent"
    state, commands = after(state, *said(phase, 8.0, NAMES[3:4]), Silent(8.0, frozenset(NAMES[4:])))
    assert commands == [Release(NAMES[4:], f"this client has not {phase.done_words} in time"), Announce(NAMES[:4])]
    assert exchange_of(state).phase is not phase


def test_too_few_keys_are_waited_for_even_if_the_others_are_silent() -> None:
    state, _ = after(drawn(), *said(Phase.ADVERTISE_KEYS, 2.0, NAMES[:2]))
    assert after(state, Silent(8.0, frozenset(NAMES[2:]))) == (state, [])


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


# --- who will not sign who is in the sum ------------------------------------------------------------------------------


def refused(now: float, *names: ClientId) -> list[Event]:
    return [Declined(now, name, "not with so few") for name in names]


def test_who_refuses_the_sum_is_not_waited_for() -> None:
    """All others have signed: without the refusal they would wait for the fifth."""
    signed, _ = after(closed(), *said(Phase.CONSISTENCY_CHECK, 51.0, NAMES[:4]))
    state, commands = after(signed, *refused(51.1, NAMES[4]))
    assert commands == [Announce(NAMES[:4]), Commit()]
    assert exchange_of(state).phase is Phase.UNMASKING
    state, commands = after(closed(), *refused(50.5, NAMES[4]), *said(Phase.CONSISTENCY_CHECK, 51.0, NAMES[:4]))
    assert commands == [Announce(NAMES[:4]), Commit()]
    committed, _ = after(state, Applied(52.0, "f" * 64))
    assert isinstance(committed, Committed)
    assert committed.closing.aggregate.clients == NAMES, "its update is in the sum all the same"


def test_who_has_refused_signs_no_more_and_who_has_signed_refuses_no_more() -> None:
    state, _ = after(closed(), *refused(51.0, NAMES[4]), *said(Phase.CONSISTENCY_CHECK, 51.0, NAMES[:1]))
    assert exchange_of(state).refused == {NAMES[4]: "not with so few"}
    again = Declined(52.0, NAMES[4], "on battery")
    assert after(state, *said(Phase.CONSISTENCY_CHECK, 52.0, NAMES[4:]), again, *refused(52.0, NAMES[0])) == (state, [])


def test_a_sum_is_refused_only_while_signatures_are_asked_for_and_by_whose_it_is() -> None:
    opening = unmasking()
    assert after(opening, *refused(52.0, *NAMES)) == (opening, [])
    assert after(closed(), *refused(52.0, ClientId("stranger"))) == (closed(), [])


def test_where_too_few_are_left_to_sign_the_attempt_ends_at_once_and_nobody_is_to_blame() -> None:
    ended = failed(*said(Phase.CONSISTENCY_CHECK, 51.0, NAMES[:1]), *refused(52.0, *NAMES[3:]), since=closed())
    assert ended.reason == "1 of at least 4 clients has signed who is in the sum; declined by d, e"
    assert ended.secure.refused == dict.fromkeys(NAMES[3:], "not with so few")
    assert ended.secure.blamed == {}
    assert next_attempt(ended, replace(PLAN, attempt=2), 200.0).avoid == ()


def test_who_fell_silent_is_to_blame_and_not_those_who_refuse_the_sum_that_lacks_it() -> None:
    keyed, _ = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0), *said(Phase.SHARE_KEYS, 2.0))
    without, _ = after(keyed, *[Reported(50.0, name, WORK) for name in NAMES[:4]], Tick(100.0))
    ended = failed(*refused(101.0, NAMES[0]), since=without)
    assert ended.secure.blamed == ended.missing
    assert ended.secure.blamed.keys() == {NAMES[4]}
    assert asked_next(ended) == {*NAMES[:4], ClientId("n0")}


def test_who_refuses_is_not_to_blame_for_one_that_signs_too_late() -> None:
    signed = said(Phase.CONSISTENCY_CHECK, 52.0, NAMES[:3])
    ended = failed(*signed, *refused(53.0, NAMES[3]), Tick(100.0), since=closed())
    assert ended.reason == "3 of at least 4 clients have signed who is in the sum in time; declined by d"
    assert ended.secure.blamed == {NAMES[4]: Phase.CONSISTENCY_CHECK.late_words}
    assert ended.secure.refused == {NAMES[3]: "not with so few"}


@pytest.mark.parametrize("is_late", [False, True], ids=["not needed", "late"])
def test_of_an_over_selection_only_who_was_late_is_to_blame_for_a_sum_without_it(*, is_late: bool) -> None:
    plan = replace(PLAN, target=4, over_selection=1.25)
    n_with_keys = 4 if is_late else 5
    keyed, _ = after(drawn(plan), *said(Phase.ADVERTISE_KEYS, 1.0, NAMES[:n_with_keys]), Tick(30.0))
    shared, _ = after(keyed, *said(Phase.SHARE_KEYS, 31.0, NAMES[:n_with_keys]))
    enough, _ = after(shared, *[Reported(50.0, name, WORK) for name in NAMES[:4]])
    assert isinstance(enough, Closing)
    assert enough.late is Outcome.SURPLUS
    ended = failed(*refused(51.0, *NAMES[:2]), since=enough)
    assert ended.secure.blamed == ({NAMES[4]: Phase.ADVERTISE_KEYS.late_words} if is_late else {})


# --- after a sum that was opened in vain ------------------------------------------------------------------------------

OVER_SELECTED = replace(PLAN, target=4, over_selection=1.25)
STATES: TypeAdapter[RoundState] = TypeAdapter(Annotated[RoundState, Discriminator("phase")])


def opened_in_vain() -> Abandoned:
    """All five were asked, the first four are in the sum, and nobody knows what was revealed of it."""
    keyed, _ = after(drawn(OVER_SELECTED), *said(Phase.ADVERTISE_KEYS, 1.0), *said(Phase.SHARE_KEYS, 2.0))
    enough, _ = after(keyed, *[Reported(50.0, name, WORK) for name in NAMES[:4]])
    return failed(*said(Phase.CONSISTENCY_CHECK, 51.0, NAMES[:4]), Tick(101.0), since=enough)


def asked_after(ended: Abandoned, attempt: int = 2) -> Training:
    """The next attempt, for which all five wait."""
    state = next_attempt(ended, replace(OVER_SELECTED, attempt=attempt), now=200.0)
    candidates = tuple(Candidate(name, 10) for name in NAMES)
    opened, _ = after(state, Gathered(state.not_before, candidates, bytes(48)))
    assert isinstance(opened, Training)
    return opened


def test_after_a_sum_opened_in_vain_its_clients_are_asked_and_a_sum_of_all_of_them_is_made() -> None:
    state: RoundState = asked_after(opened_in_vain())
    assert isinstance(state, Training)
    assert (tuple(state.cohort), state.target, state.needs_all) == (NAMES[:4], 4, True)
    state, _ = after(state, *said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:4]), *said(Phase.SHARE_KEYS, 202.0, NAMES[:4]))
    state, _ = after(state, *[Reported(250.0, name, WORK) for name in NAMES[:3]])
    assert isinstance(state, Training), "three of four would do in any other round"
    state, _ = after(state, Reported(250.0, NAMES[3], WORK))
    assert isinstance(state, Closing)
    assert state.reason == "the target of 4 reports is in"


LACKING = "d did not come, and sites refuse another sum over this model without any of those asked"
WITHOUT_ONE: dict[str, tuple[list[Event], float, str]] = {
    "keys": (
        [*said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:3]), Tick(230.0)],
        230.0,
        "3 of at least 4 clients have advertised keys in time",
    ),
    "keys, and nobody ticked": (
        [*said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:3]), Tick(300.0)],
        300.0,
        "the window of 100 s is over, and clients have not all advertised keys",
    ),
    "shares": (
        [*said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:4]), *said(Phase.SHARE_KEYS, 202.0, NAMES[:3]), Tick(265.0)],
        265.0,
        "3 of at least 4 clients have shared their keys in time",
    ),
    "report": (
        [
            *said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:4]),
            *said(Phase.SHARE_KEYS, 202.0, NAMES[:4]),
            *[Reported(250.0, name, WORK) for name in NAMES[:3]],
            Tick(300.0),
        ],
        300.0,
        "the window of 100 s is over with 3 of at least 4 reports",
    ),
    "report, declined": (
        [
            *said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:4]),
            *said(Phase.SHARE_KEYS, 202.0, NAMES[:4]),
            *[Reported(250.0, name, WORK) for name in NAMES[1:3]],
            Declined(251.0, NAMES[3], "on battery"),
        ],
        251.0,
        "d declined, with 2 of at least 4 reports",
    ),
    "report, declined before the others have shared": (
        [
            *said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:4]),
            *said(Phase.SHARE_KEYS, 202.0, NAMES[1:4]),
            Declined(203.0, NAMES[3], "on battery"),
            *said(Phase.SHARE_KEYS, 204.0, NAMES[:1]),
        ],
        204.0,
        "d declined, with 0 of at least 4 reports",
    ),
}


@pytest.mark.parametrize(("events", "ended_at", "reason"), WITHOUT_ONE.values(), ids=WITHOUT_ONE.keys())
def test_without_one_of_them_it_is_abandoned_and_the_reason_names_that_one(
    events: list[Event], ended_at: float, reason: str
) -> None:
    ended = failed(*events, since=asked_after(opened_in_vain()))
    assert ended.reason == f"{reason}; {LACKING}"
    assert ended.closed_at == ended_at
    assert ended.secure.blamed.keys() == {NAMES[3]}, "the others did what was asked, or had time left"
    assert not ended.secure.was_revealed


def test_what_was_opened_in_vain_is_stored_with_whatever_follows_until_there_is_a_model() -> None:
    opened = (OpenedSum(NAMES[:4], 5),)
    training = asked_after(opened_in_vain())
    closing, _ = after(
        training,
        *said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:4]),
        *said(Phase.SHARE_KEYS, 202.0, NAMES[:4]),
        *[Reported(250.0, name, WORK) for name in NAMES[:4]],
    )
    too_few = failed(*said(Phase.CONSISTENCY_CHECK, 251.0, NAMES[:2]), Tick(500.0), since=closing)
    recruiting = next_attempt(too_few, replace(OVER_SELECTED, attempt=3), 600.0)
    stopped, _ = after(recruiting, Stopped(601.0, "enough"))
    for state in (training, closing, too_few, recruiting, stopped):
        assert not isinstance(state, Committed)
        assert opened_of(state) == opened
        assert STATES.validate_json(STATES.dump_json(state)) == state
    assert tuple(asked_after(too_few, attempt=3).cohort) == NAMES[:4]


def test_a_sum_of_others_that_is_opened_in_vain_is_known_beside_the_first() -> None:
    ended = opened_in_vain()
    assert sums_before(ended) == SumsBefore((OpenedSum(NAMES[:4], 5),))
    first = OpenedSum((ClientId("x"), ClientId("y"), ClientId("z")), 3)
    again = replace(ended, secure=replace(ended.secure, opened=(first,)))
    assert sums_before(again) == SumsBefore((first, OpenedSum(NAMES[:4], 5)))
    assert sums_before(replace(again, secure=SecureEnd(opened=(first,)))) == SumsBefore((first,))
    assert sums_before(replace(again, secure=SecureEnd())) is None


# --- by whom a round has failed ---------------------------------------------------------------------------------------


def failed(*events: Event, since: RoundState | None = None) -> Abandoned:
    state, _ = after(since or drawn(), *events)
    assert isinstance(state, Abandoned)
    return state


def unmasking() -> RoundState:
    """All of them have signed who is in the sum; their shares are due at 101."""
    return after(closed(), *said(Phase.CONSISTENCY_CHECK, 51.0))[0]


def asked_next(ended: Abandoned) -> set[ClientId]:
    """The next cohort, where as many others wait as have failed."""
    state = next_attempt(ended, replace(PLAN, attempt=2), now=200.0)
    fresh = [ClientId(f"n{i}") for i in range(len(ended.secure.blamed))]
    opened, _ = after(state, Gathered(200.0, tuple(Candidate(name, 10) for name in (*NAMES, *fresh)), bytes(48)))
    assert isinstance(opened, Training)
    return set(opened.cohort)


FAILED: dict[Phase, tuple[Abandoned, int]] = {
    Phase.ADVERTISE_KEYS: (failed(*said(Phase.ADVERTISE_KEYS, 1.0, NAMES[:2]), Tick(30.0)), 2),
    Phase.SHARE_KEYS: (
        failed(*said(Phase.ADVERTISE_KEYS, 1.0), *said(Phase.SHARE_KEYS, 2.0, NAMES[:3]), Tick(40.0)),
        3,
    ),
    Phase.CONSISTENCY_CHECK: (
        failed(*said(Phase.CONSISTENCY_CHECK, 52.0, NAMES[:3]), Tick(100.0), since=closed()),
        3,
    ),
    Phase.UNMASKING: (failed(Tick(101.0, Revealed(NAMES[:3])), since=unmasking()), 3),
}


@pytest.mark.parametrize("phase", list(FAILED), ids=str)
def test_who_was_asked_in_the_phase_that_failed_and_kept_silent_is_named_and_asked_last(phase: Phase) -> None:
    ended, n_spoke = FAILED[phase]
    assert ended.secure.blamed == dict.fromkeys(NAMES[n_spoke:], phase.late_words)
    assert asked_next(ended).isdisjoint(NAMES[n_spoke:])
    assert asked_next(ended) > set(NAMES[:n_spoke])
    assert all(ended.secure.blamed.get(client, why) == why for client, why in ended.missing.items()), (
        "the record has it, too"
    )


def test_too_few_masked_updates_are_the_fault_of_those_who_sent_none() -> None:
    """Three came, which is the plan's minimum; the five that advertised keys need four."""
    keyed, _ = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0), *said(Phase.SHARE_KEYS, 2.0))
    ended = failed(*[Reported(50.0, name, WORK) for name in NAMES[:3]], Tick(100.0), since=keyed)
    assert ended.reason == "the window of 100 s is over with 3 of at least 4 reports"
    assert ended.secure.blamed == ended.missing
    assert asked_next(ended).isdisjoint(NAMES[3:])


def test_who_still_had_time_is_not_to_blame_where_the_others_have_declined() -> None:
    declined = [Declined(2.0, name, "on battery") for name in NAMES[:3]]
    ended = failed(*said(Phase.ADVERTISE_KEYS, 1.0, NAMES[3:4]), *declined)
    assert ended.reason == "1 of at least 3 clients has advertised keys; declined by a, b, c"
    assert ended.secure.blamed == dict.fromkeys(NAMES[:3], "on battery")


def test_a_phase_that_ends_because_all_others_spoke_and_one_declined_names_the_decline() -> None:
    """Nothing was late: the attempt ends in the second in which the client declines."""
    ended = failed(
        *said(Phase.ADVERTISE_KEYS, 201.0, NAMES[:3]),
        Declined(201.0, NAMES[3], "on battery"),
        since=asked_after(opened_in_vain()),
    )
    assert ended.reason.startswith("3 of at least 4 clients have advertised keys; declined by d; d did not come")


def test_who_was_too_late_for_the_phase_before_is_to_blame_too() -> None:
    ended = failed(
        *said(Phase.ADVERTISE_KEYS, 1.0, NAMES[:4]),
        Tick(30.0),
        *said(Phase.SHARE_KEYS, 31.0, NAMES[:2]),
        Tick(65.0),
    )
    keys, shares = Phase.ADVERTISE_KEYS.late_words, Phase.SHARE_KEYS.late_words
    assert ended.secure.blamed == {NAMES[2]: shares, NAMES[3]: shares, NAMES[4]: keys}


def test_who_was_too_late_and_declines_then_was_too_late() -> None:
    """Its own words do not take the place of what has put it out of the round."""
    ended = failed(
        *said(Phase.ADVERTISE_KEYS, 1.0, NAMES[:4]),
        Tick(30.0),
        *[Declined(31.0, name, "on battery") for name in (NAMES[4], *NAMES[2:4])],
    )
    late = Phase.ADVERTISE_KEYS.late_words
    assert ended.secure.blamed == {NAMES[2]: "on battery", NAMES[3]: "on battery", NAMES[4]: late}
    assert ended.missing[NAMES[4]] == late


def test_a_dealer_whose_shares_did_not_open_is_named_in_the_reason() -> None:
    revealed = Revealed(NAMES[:4], {NAMES[1]: "shares that it dealt did not open", ClientId("stranger"): "nor these"})
    ended = failed(Tick(101.0, revealed), since=unmasking())
    assert ended.reason == "the sum could not be unmasked in time: too few shares opened of those that b dealt"
    assert ended.secure.blamed == {NAMES[1]: "shares that it dealt did not open", NAMES[4]: Phase.UNMASKING.late_words}


def test_who_revealed_no_share_of_a_client_of_whom_others_did_is_named_in_the_reason() -> None:
    withheld = {NAMES[2]: "it revealed no share of a", ClientId("stranger"): "nor this one"}
    ended = failed(Tick(101.0, Revealed(NAMES[:4], withheld=withheld)), since=unmasking())
    assert ended.reason == (
        "the sum could not be unmasked in time: c withheld shares of clients whose other holders revealed theirs"
    )
    assert ended.secure.blamed == {NAMES[2]: "it revealed no share of a", NAMES[4]: Phase.UNMASKING.late_words}


def test_who_dealt_false_shares_and_revealed_none_of_anothers_is_told_both() -> None:
    revealed = Revealed(NAMES, {NAMES[1]: "they did not open at c, d"}, {NAMES[1]: "it revealed no share of a"})
    ended = failed(Tick(101.0, revealed), since=unmasking())
    assert ended.reason == (
        "the sum could not be unmasked in time: too few shares opened of those that b dealt; "
        "b withheld shares of clients whose other holders revealed theirs"
    )
    assert ended.secure.blamed == {NAMES[1]: "they did not open at c, d; it revealed no share of a"}


def test_where_nobody_knows_what_was_revealed_nobody_is_to_blame() -> None:
    ended = failed(Tick(101.0), since=unmasking())
    assert ended.reason == "the sum could not be unmasked in time: fewer than 4 of 5 clients revealed shares"
    assert ended.secure.blamed == {}
    assert next_attempt(ended, replace(PLAN, attempt=2), 200.0).avoid == ()


def test_who_has_revealed_is_no_matter_in_another_phase_nor_before_the_time_is_up() -> None:
    assert after(unmasking(), Tick(60.0, Revealed(NAMES[:1]))) == (unmasking(), [])
    ended = failed(*said(Phase.CONSISTENCY_CHECK, 52.0, NAMES[:3]), Tick(100.0, Revealed(())), since=closed())
    assert ended.secure.blamed == dict.fromkeys(NAMES[3:], Phase.CONSISTENCY_CHECK.late_words)


def test_a_dealer_of_wrong_shares_is_named_and_asked_last() -> None:
    blamed = {NAMES[2]: "it has dealt wrong shares", ClientId("stranger"): "so has it"}
    ended = failed(Spoiled(60.0, "the sum cannot be unmasked", blamed), since=unmasking())
    assert ended.secure.blamed == {NAMES[2]: "it has dealt wrong shares"}
    assert asked_next(ended) == {*NAMES, ClientId("n0")} - {NAMES[2]}


def test_a_dealer_that_has_left_before_the_sum_is_said_to_have_dealt_wrong_shares() -> None:
    keyed, _ = after(drawn(), *said(Phase.ADVERTISE_KEYS, 1.0), *said(Phase.SHARE_KEYS, 2.0))
    gone, _ = after(keyed, *[Reported(50.0, name, WORK) for name in NAMES[:4]], Tick(100.0))
    agreed, _ = after(gone, *said(Phase.CONSISTENCY_CHECK, 101.0, NAMES[:4]))
    ended = failed(Spoiled(102.0, "the sum cannot be unmasked", {NAMES[4]: "wrong shares"}), since=agreed)
    assert ended.missing == {NAMES[4]: "wrong shares"}


def test_an_operator_and_a_sum_beyond_its_bits_are_nobodys_fault() -> None:
    assert failed(Stopped(1.0, "enough")).secure.blamed == {}
    ended = failed(Spoiled(60.0, "values lie near the edge"), since=unmasking())
    assert ended.secure.blamed == {}
    assert next_attempt(ended, replace(PLAN, attempt=2), 200.0).avoid == ()
