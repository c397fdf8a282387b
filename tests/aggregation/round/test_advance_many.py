"""Many events at once give what they give one after another: the same state, the same commands."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Task, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round import advance_many
from umbel.aggregation.round.advance_many import advance_all
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import (
    Closing,
    Command,
    Declined,
    Event,
    Reported,
    RoundState,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.types import ClientId, RunId

CLIENTS = [ClientId(f"c{i}") for i in range(9)]
STRANGER = ClientId("stranger")
WORK = WorkDone(3, 1, 2, "0" * 64)

names = st.sampled_from([*CLIENTS, STRANGER])
times = st.floats(0, 12)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Reported, times, names, st.just(WORK)),
    st.builds(Reported, st.floats(0, 9), names, st.just(WORK)),
    st.builds(Declined, times, names, st.just("busy")),
    st.builds(Tick, times),
    st.builds(Stopped, times, st.just("enough")),
)
floors = st.sampled_from([CoverageFloor(), CoverageFloor(samples=0.5), CoverageFloor(sites=(CLIENTS[2],), strict=True)])


@st.composite
def rounds(draw: st.DrawFn) -> Training:
    target = draw(st.integers(1, 8))
    plan = RoundPlan(
        RunId("run"),
        1,
        1,
        target,
        draw(st.integers(1, target)),
        1.0,
        10.0,
        draw(st.sampled_from(Weighting)),
        100,
        64.0,
        seed=1,
        coverage=draw(floors),
        task=draw(st.sampled_from([Task.TRAINING, Task.EVALUATION])),
    )
    cohort = {client: Member(draw(st.integers(1, 3)), 5) for client in CLIENTS[: draw(st.integers(1, 9))]}
    return Training(plan, cohort, opened_at=0.0)


def one_by_one(state: RoundState, given_events: Sequence[Event]) -> tuple[RoundState, tuple[Command, ...]]:
    commands = list[Command]()
    for event in given_events:
        state, following = advance(state, event)
        commands.extend(following)
    return state, tuple(commands)


@given(rounds(), st.lists(events, max_size=30))
@settings(max_examples=400, deadline=None)
def test_together_is_one_after_another(state: Training, given_events: list[Event]) -> None:
    assert advance_all(state, given_events) == one_by_one(state, given_events)


def test_reports_that_cannot_end_the_round_are_taken_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, each would copy all that came before it."""
    alone = list[Event]()

    def counted(state: RoundState, event: Event) -> tuple[RoundState, tuple[Command, ...]]:
        alone.append(event)
        return advance(state, event)

    monkeypatch.setattr(advance_many, "advance", counted)
    plan = RoundPlan(RunId("run"), 1, 1, 1000, 1, 1.0, 10.0, Weighting.SAMPLES, 100, 64.0, seed=1)
    reports = [Reported(1.0, ClientId(f"c{i}"), WORK) for i in range(1000)]
    state = Training(plan, {report.client: Member(1, 5) for report in reports}, opened_at=0.0)
    closed, _ = advance_all(state, reports)
    assert isinstance(closed, Closing)
    assert alone == [reports[-1]], "the one that ends the round"


@given(rounds(), st.permutations(CLIENTS))
@settings(deadline=None)
def test_reports_of_all_in_any_order_end_the_round_where_they_would(state: Training, order: list[ClientId]) -> None:
    reports = [Reported(0.1 * i, client, WORK) for i, client in enumerate(order)]
    assert advance_all(state, reports) == one_by_one(state, reports)
