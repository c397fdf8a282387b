"""The round machine under its laws (`round_laws.py`), for each kind of round."""

from dataclasses import replace
from typing import Any

from hypothesis import given, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.aggregation.round.round_laws import CLIENTS, TIERS, RoundLaws, anybody
from tests.aggregation.round.secure_round_laws import SecureRoundLaws
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Task, Weighting
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.machine import advance, advance_to_end
from umbel.aggregation.round.second_sum import OpenedSum
from umbel.aggregation.round.states import (
    Declined,
    Event,
    Gathered,
    Outage,
    Recruiting,
    Reported,
    RoundState,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId, RunId

NO_FLOOR = CoverageFloor()
floors = st.builds(
    lambda samples, site, tier, is_strict: CoverageFloor(
        samples, site, tier, is_strict and bool(samples or site or tier)
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([(), (CLIENTS[0],), (CLIENTS[5],), (ClientId("nowhere"),)]),
    st.sampled_from([(), ("odd",), ("nothing",)]),
    st.booleans(),
)


def training_plan(
    minimum: int, more: int, over: float, window_s: float, weighting: Weighting, seed: int, floor: CoverageFloor
) -> RoundPlan:
    fits = len(floor.sites) + len(floor.tiers) <= minimum + more
    return RoundPlan(
        RunId("demo"),
        1,
        1,
        minimum + more,
        minimum,
        over,
        window_s,
        weighting,
        100,
        64.0,
        seed,
        floor if fits else NO_FLOOR,
    )


def secured(plan: RoundPlan) -> RoundPlan:
    is_proportional = plan.weighting is Weighting.PROPORTIONAL
    return replace(plan, secure=SecurePlan(16, 1, 16, minimum=plan.minimum, is_proportional=is_proportional))


def training_plans(
    minimum: st.SearchStrategy[int], *floor: st.SearchStrategy[CoverageFloor]
) -> st.SearchStrategy[RoundPlan]:
    return st.builds(
        training_plan,
        minimum=minimum,
        more=st.integers(0, 2),
        over=st.sampled_from([1.0, 1.5, 2.0]),
        window_s=st.sampled_from([5.0, 40.0]),
        weighting=st.sampled_from(Weighting),
        seed=st.integers(0, 20),
        floor=st.one_of(*floor),
    )


plans = training_plans(st.integers(1, 3), st.just(NO_FLOOR), floors)
secure = training_plans(st.integers(3, 4), st.just(NO_FLOOR), st.just(NO_FLOOR), floors).map(secured)
opened_sums = st.builds(
    lambda clients, n_more: OpenedSum(tuple(sorted(clients)), len(clients) + n_more),
    st.sets(st.sampled_from(CLIENTS), min_size=3),
    st.integers(0, 2),
)
others = st.builds(
    lambda task, minimum, more, over, window_s, seed, sites: RoundPlan(
        RunId("demo"),
        1,
        1,
        minimum + more,
        minimum,
        over if task is Task.EVALUATION else 1.0,
        window_s,
        Weighting.SAMPLES,
        100,
        64.0,
        seed,
        CoverageFloor(sites=sites if task is Task.CANARY else ()),
        task=task,
    ),
    task=st.sampled_from([Task.EVALUATION, Task.CANARY]),
    minimum=st.integers(1, 3),
    more=st.integers(0, 2),
    over=st.sampled_from([1.0, 1.5, 2.0]),
    window_s=st.sampled_from([5.0, 40.0]),
    seed=st.integers(0, 20),
    sites=st.sampled_from([(), (CLIENTS[0],), (CLIENTS[5],), (ClientId("nowhere"),)]),
)


def report(now: float, client: ClientId, samples: int) -> Event:
    return Reported(now, client, WorkDone(samples, 1, 1, "0" * 64))


moments = st.sampled_from([0.0, 0.1, 4.9, 5.0, 39.0])
interruptions = st.one_of(
    st.builds(report, moments, anybody, st.integers(1, 100)),
    st.builds(Declined, moments, anybody, st.just("low battery")),
    st.builds(Tick, moments),
    st.builds(Outage, moments, moments),
)


@given(
    plan=st.one_of(plans, others),
    n=st.integers(1, 6),
    order=st.permutations(CLIENTS),
    between=st.lists(st.tuples(st.integers(0, 6), interruptions), max_size=3),
)
def test_a_window_played_to_its_end_is_as_event_by_event(
    plan: RoundPlan, n: int, order: list[ClientId], between: list[tuple[int, Event]]
) -> None:
    candidates = tuple(map(Candidate, CLIENTS[:n], [10, 20, 30, 40, 50, 60], TIERS))
    begun, _ = advance(Recruiting(plan, since=-plan.patience_s), Gathered(0.0, candidates))
    if not isinstance(begun, Training):
        reject()
    events = [report(0.1, client, 10) for client in order if client in begun.cohort]
    for place, event in between:
        events.insert(place, event)
    state: RoundState = begun
    for n_seen, event in enumerate(events, 1):
        if isinstance(state, Training):
            state, _ = advance(state, event)
        assert advance_to_end(begun, events[:n_seen]) == state


class TrainingMachine(RoundLaws):
    """A round that makes a model."""

    @initialize(plan=plans)
    def begin(self, plan: RoundPlan) -> None:
        self.open_books(plan)


class OtherMachine(RoundLaws):
    """A round that makes none: an evaluation, by those who did not train, or a canary."""

    @initialize(plan=others, trained=st.sets(st.sampled_from(CLIENTS), max_size=4))
    def begin(self, plan: RoundPlan, trained: set[ClientId]) -> None:
        self.open_books(plan, tuple(sorted(trained)) if plan.task is Task.EVALUATION else ())


class SecureMachine(SecureRoundLaws):
    """A round whose sum alone the coordinator can read."""

    @initialize(
        plan=secure,
        n_phases=st.integers(0, 5),
        silent=st.sets(st.sampled_from(CLIENTS), max_size=1),
        is_waited_for=st.booleans(),
        opened=st.one_of(st.just(()), st.tuples(opened_sums)),
    )
    def begin(
        self,
        plan: RoundPlan,
        n_phases: int,
        silent: set[ClientId],
        is_waited_for: bool,
        opened: tuple[OpenedSum, ...],
    ) -> None:
        """Some phases pass well before the walk begins, or few walks would come to the end of all five.

        `is_waited_for`: who is silent, until the time of the phase is up. A sum that was opened has met a strict floor,
        and these have not.
        """
        self.open_books(plan, opened=() if plan.coverage.strict else opened)
        if n_phases:
            self.wait_for_clients_until_patience_is_over(len(CLIENTS))
        for _ in range(1, n_phases):
            self.others_say_what_is_awaited(silent, 0.01)
            self.nothing_is_said_until_the_deadline(bool(silent) and is_waited_for, 0.0)


TestTraining: Any = TrainingMachine.TestCase
TestTraining.settings = settings(stateful_step_count=30)
TestEvaluationAndCanary: Any = OtherMachine.TestCase
TestEvaluationAndCanary.settings = settings(stateful_step_count=30)
TestSecure: Any = SecureMachine.TestCase
TestSecure.settings = settings(stateful_step_count=40)


def test_replaying_the_same_events_gives_the_same_states_and_commands() -> None:
    """No clock, no randomness: the round is a function of its plan and its events."""
    plan = RoundPlan(RunId("demo"), 1, 1, 3, 1, 2.0, 40.0, Weighting.PROPORTIONAL, 100, 64.0, seed=5)
    work = WorkDone(10, 1, 1, "0" * 64)
    events: list[Event] = [Gathered(1, tuple(Candidate(client, 10) for client in CLIENTS))]
    events += [Reported(2.0 + i, client, work) for i, client in enumerate(CLIENTS)]
    runs: list[list[object]] = []
    for _ in range(2):
        state: RoundState = Recruiting(replace(plan), since=0.0)
        steps: list[object] = []
        for event in events:
            state, commands = advance(state, event)
            steps.append((state, commands))
        runs.append(steps)
    assert runs[0] == runs[1]
