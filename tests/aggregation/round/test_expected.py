"""A round waits for expected clients, for a stated time, and no longer."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.round.cohort import Expected
from umbel.aggregation.round.machine import advance, next_deadline
from umbel.aggregation.round.states import Gathered, Hurried, Invite, Recruiting, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId, RunId

PLAN = RoundPlan(RunId("ward"), 1, 1, 4, 3, 1.0, 60.0, Weighting.SAMPLES, 1000, 64.0, seed=7)
SITES = tuple(ClientId(name) for name in ("bonn", "dresden", "jena", "ulm"))


def came(*clients: ClientId) -> tuple[Candidate, ...]:
    return tuple(Candidate(client, 10) for client in clients)


def expecting(until: float, others_until: float = 0.0) -> Expected:
    return Expected(dict.fromkeys(SITES, until), others_until=others_until)


def test_the_round_waits_for_an_expected_client_beyond_its_patience() -> None:
    state, commands = advance(Recruiting(PLAN, 0.0), Gathered(50.0, came(*SITES[:3]), expected=expecting(300.0)))
    assert isinstance(state, Recruiting)
    assert (state.missing, state.waits_until, commands) == (("ulm",), 300.0, ())
    assert state.why == "waiting for clients: 3 of 4 here; starting with these in at most 4 min 10 s"
    assert next_deadline(state, 50.0) == 300.0


def test_the_last_expected_client_starts_the_round_at_once() -> None:
    state, _ = advance(Recruiting(PLAN, 0.0), Gathered(50.0, came(*SITES[:3]), expected=expecting(300.0)))
    state, commands = advance(state, Gathered(51.0, came(*SITES), expected=expecting(300.0)))
    assert isinstance(state, Training)
    assert commands == (Invite(SITES),)


def test_the_round_starts_with_those_that_wait_when_the_time_is_over() -> None:
    state, _ = advance(Recruiting(PLAN, 0.0), Gathered(50.0, came(*SITES[:3]), expected=expecting(300.0)))
    state, _ = advance(state, Gathered(300.0, came(*SITES[:3]), expected=expecting(300.0)))
    assert isinstance(state, Training)
    assert set(state.cohort) == set(SITES[:3])


def test_an_operator_can_start_the_round_at_once_but_not_below_the_minimum() -> None:
    state, _ = advance(Recruiting(PLAN, 0.0), Hurried(1.0))
    short, _ = advance(state, Gathered(2.0, came(*SITES[:2]), expected=expecting(300.0)))
    assert isinstance(short, Recruiting)
    assert short.why == "waiting for clients: 2 of 4 here, at least 3 needed to start"
    begun, _ = advance(state, Gathered(2.0, came(*SITES[:3]), expected=expecting(300.0)))
    assert isinstance(begun, Training)


def test_an_expected_client_that_cannot_be_drawn_yet_is_waited_for() -> None:
    uncounted = Candidate(SITES[3], 0)
    state, _ = advance(Recruiting(PLAN, 0.0), Gathered(50.0, (*came(*SITES[:3]), uncounted), expected=expecting(300.0)))
    assert isinstance(state, Recruiting)
    assert (state.missing, state.waits_until) == (("ulm",), 300.0)


def test_unused_tokens_are_waited_for_too() -> None:
    expected = Expected({}, unnamed=1, unnamed_until=300.0)
    state, _ = advance(Recruiting(PLAN, 0.0), Gathered(299.0, came(*SITES[:3]), expected=expected))
    assert isinstance(state, Recruiting)
    state, _ = advance(state, Gathered(299.0, came(*SITES[:3]), expected=replace(expected, unnamed=0)))
    assert isinstance(state, Training)


times = st.floats(0.0, 400.0, allow_nan=False)
here = st.sets(st.sampled_from(SITES)).map(lambda names: tuple(sorted(names)))
expectations = st.builds(
    Expected, st.dictionaries(st.sampled_from(SITES), times), st.integers(0, 2), times, others_until=times
)


@given(times, here, expectations, st.booleans())
def test_a_round_begins_if_and_only_if_enough_wait_and_nobody_is_waited_for(
    now: float, clients: tuple[ClientId, ...], expected: Expected, is_hurried: bool
) -> None:
    state = Recruiting(PLAN, 0.0, is_hurried=is_hurried)
    after, _ = advance(state, Gathered(now, came(*clients), expected=expected))
    is_waited_for = any(until > now for client, until in expected.until.items() if client not in clients)
    is_waited_for |= expected.others_until > now or (expected.unnamed > 0 and expected.unnamed_until > now)
    must_begin = len(clients) == 4 or (len(clients) == 3 and (is_hurried or not is_waited_for))
    assert isinstance(after, Training) is must_begin
    if isinstance(after, Recruiting) and len(clients) == 3:
        due = next_deadline(after, now)
        assert due is not None
        assert due > now, "the coordinator looks again when the wait is over"
        begun, _ = advance(after, Gathered(due, came(*clients), expected=expected))
        assert isinstance(begun, Training), "the round begins at its deadline"
