"""The laws of the round machine, held against everything a network can do to it (hypothesis, stateful).

The test keeps its own books (who was folded, who was answered what, how often the round ended) from the commands alone,
as the coordinator would, and compares them with the state after every step.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any, assert_never

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from umbel.aggregation.advance import advance, takes
from umbel.aggregation.coverage import Gap, Roll, gaps
from umbel.aggregation.messages import Outcome
from umbel.aggregation.round import (
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
    Recruiting,
    Release,
    Reported,
    RoundState,
    Spoiled,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.types import ClientId, CoverageFloor, RoundPlan, RunId, Weighting, WorkDone
from umbel.aggregation.weighting import Candidate, weight_of

CLIENTS = tuple(ClientId(f"c{i}") for i in range(6))
TIERS = ("even", "odd") * 3
STRANGER = ClientId("stranger")
ALLOWED = {
    ("recruiting", "training"),
    ("recruiting", "abandoned"),
    ("training", "closing"),
    ("training", "abandoned"),
    ("closing", "committed"),
    ("closing", "abandoned"),
}

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
plans = st.builds(
    lambda minimum, more, over, window_s, weighting, seed, floor: RoundPlan(
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
        floor if len(floor.sites) + len(floor.tiers) <= minimum + more else NO_FLOOR,
    ),
    minimum=st.integers(1, 3),
    more=st.integers(0, 2),
    over=st.sampled_from([1.0, 1.5, 2.0]),
    window_s=st.sampled_from([5.0, 40.0]),
    weighting=st.sampled_from(Weighting),
    seed=st.integers(0, 20),
    floor=st.one_of(st.just(NO_FLOOR), floors),
)
works = st.builds(lambda n, done: WorkDone(n, done, 4, "0" * 64), st.integers(1, 100), st.integers(1, 4))
anybody = st.sampled_from([*CLIENTS, STRANGER])
seldom = st.integers(0, 5).map(lambda n: n == 5)  # not `assume`: it would throw away all the steps before


class RoundMachine(RuleBasedStateMachine):
    """Drives one round and keeps the coordinator's books beside it."""

    state: RoundState
    now: float

    @initialize(plan=plans)
    def begin(self, plan: RoundPlan) -> None:
        self.now = 0.0
        self.plan = plan
        self.state = Recruiting(plan, since=0.0)
        self.folds: dict[ClientId, int] = {}
        self.answers: dict[ClientId, Answer] = {}
        self.ends: Counter[str] = Counter()
        self.released: tuple[ClientId, ...] | None = None

    # --- what the network and the clock do ----------------------------------------------------------------------------

    @rule(n=st.integers(0, 6), counts=st.lists(st.integers(0, 200), min_size=6, max_size=6))
    def gather(self, n: int, counts: list[int]) -> None:
        self.send(Gathered(self.now, tuple(map(Candidate, CLIENTS[:n], counts, TIERS))))

    @rule()
    def gather_everybody(self) -> None:
        self.send(Gathered(self.now, tuple(Candidate(*one) for one in zip(CLIENTS, [10] * 6, TIERS, strict=True))))

    @rule(client=anybody, work=works)
    def report(self, client: ClientId, work: WorkDone) -> None:
        self.send(Reported(self.now, client, work))

    @rule(client=anybody, first=works, second=works)
    def report_twice(self, client: ClientId, first: WorkDone, second: WorkDone) -> None:
        self.send(Reported(self.now, client, first))
        answer, folds, state = self.answers[client], dict(self.folds), self.state
        self.send(Reported(self.now, client, second))
        assert (self.answers[client], self.folds, self.state) == (answer, folds, state)

    @rule(client=anybody, work=works, early_s=st.floats(0, 50))
    def report_with_a_clock_that_ran_backward(self, client: ClientId, work: WorkDone, early_s: float) -> None:
        self.send(Reported(self.now - early_s, client, work))

    @precondition(lambda self: isinstance(self.state, Training))
    @rule(client=anybody, work=works)
    def report_late(self, client: ClientId, work: WorkDone) -> None:
        assert isinstance(self.state, Training)
        accepted = client in self.state.accepted
        late_at = self.state.closes_at
        self.send(Reported(late_at, client, work))
        self.now = max(self.now, late_at)
        assert client in self.folds or not accepted
        assert accepted or client not in self.folds, "a late report was folded"

    @rule(client=anybody)
    def decline(self, client: ClientId) -> None:
        self.send(Declined(self.now, client, "low battery"))

    @rule(some=st.sets(anybody))
    def everybody_else_declines(self, some: set[ClientId]) -> None:
        for client in (*CLIENTS, STRANGER):
            if client not in some:
                self.send(Declined(self.now, client, "low battery"))

    @rule(after_s=st.sampled_from([0.0, 0.1, 4.9, 5.0, 39.0]))
    def tick(self, after_s: float) -> None:
        self.now += after_s
        self.send(Tick(self.now))

    @rule(early_s=st.floats(0, 100))
    def tick_backward(self, early_s: float) -> None:
        self.send(Tick(self.now - early_s))

    @rule(does=seldom)  # or no round would live
    def stop(self, does: bool) -> None:
        if does:
            self.send(Stopped(self.now, "enough"))

    @rule()
    def apply(self) -> None:
        self.send(Applied(self.now, "f" * 64))

    @rule(does=seldom)  # or no round would be committed
    def spoil(self, does: bool) -> None:
        if not does:
            return
        before = self.state
        self.send(Spoiled(self.now, "an update is gone"))
        assert (self.state == before) is not isinstance(before, Closing), "only a closing round can be spoiled"

    # --- the books ----------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        before = self.state
        self.state, commands = advance(before, event)
        for command in commands:
            self.carry_out(command)
        assert self.state.phase == before.phase or (before.phase, self.state.phase) in ALLOWED
        if isinstance(before, Committed | Abandoned):
            assert self.state == before, "a terminal phase absorbs every event"
        if isinstance(event, Reported):
            assert [c.client for c in commands if isinstance(c, Answer)] == [event.client], "each report has its answer"
            assert takes(before, event) == any(isinstance(c, Fold) for c in commands), "checked exactly when it counts"
        self.check_the_order_of(commands)
        self.check_the_end(before, event)

    def carry_out(self, command: Command) -> None:
        match command:
            case Fold(client, weight):
                assert client not in self.folds, f"{client} was folded twice"
                assert not self.ends, "a fold after the end"
                self.folds[client] = weight
            case Answer(client, outcome, reason):
                assert reason
                if client in self.folds and not self.ends["discard"]:
                    assert outcome is Outcome.ACCEPTED
                if outcome is Outcome.ACCEPTED:
                    assert client in self.folds, f"{client} was told that its report counts, and it does not"
                self.answers[client] = command
            case Release(clients):
                assert self.released is None
                self.released = clients
            case Commit():
                self.ends["commit"] += 1
            case Discard(reason):
                assert reason
                self.ends["discard"] += 1
            case Invite(clients):
                assert isinstance(self.state, Training)
                assert clients == tuple(self.state.cohort)
                assert sum(member.draws for member in self.state.cohort.values()) <= self.plan.n_wanted
            case _:
                assert_never(command)

    def check_the_order_of(self, commands: tuple[Command, ...]) -> None:
        kinds = [type(command) for command in commands]
        for earlier, later in pairwise(kinds):
            assert (earlier, later) != (Commit, Fold)
        if Commit in kinds and Fold in kinds:
            assert kinds.index(Fold) < kinds.index(Commit), "what closes the round is folded before the sum is taken"

    def check_the_end(self, before: RoundState, event: Event) -> None:
        if not isinstance(before, Training) or isinstance(self.state, Training):
            return
        assert isinstance(self.state, Closing | Abandoned)
        n_reported = sum(before.cohort[client].draws for client in self.folds)
        heard = {*self.folds, *(c for c in before.declined), *([event.client] if isinstance(event, Declined) else [])}
        all_heard = set(before.cohort) <= heard
        is_over = event.now >= before.opened_at + self.plan.window_s
        is_strict, known = self.plan.coverage.strict, self.gaps_when_it_ended(before, event)
        if isinstance(self.state, Closing):
            assert len(self.folds) >= self.plan.minimum
            assert n_reported >= self.plan.target or is_over or all_heard
            is_surplus = n_reported >= self.plan.target and not is_over
            assert self.state.late is (Outcome.SURPLUS if is_surplus else Outcome.LATE)
            assert not (is_strict and known), "strict coverage was not met, and the round closed"
            assert is_over or all_heard or not any(gap.may_close for gap in known), (
                "what may still come was not awaited"
            )
            assert all(gap.what in self.state.reason for gap in known), "what is not covered is named"
        elif not isinstance(event, Stopped):
            assert len(self.folds) < self.plan.minimum or (is_strict and known)
            assert is_over or all_heard or (is_strict and not all(gap.may_close for gap in known))
        assert (self.released or ()) == tuple(c for c in before.cohort if c not in heard), "exactly the unheard"

    def gaps_when_it_ended(self, before: Training, event: Event) -> tuple[Gap, ...]:
        declined = {name: why for name, why in before.declined.items() if name not in self.folds}
        if isinstance(event, Declined) and event.client in before.cohort and event.client not in self.folds:
            declined[event.client] = event.reason
        return gaps(Roll(self.plan, before.cohort, self.folds, declined))

    @invariant()
    def the_round_ends_once(self) -> None:
        expected: dict[str, list[dict[str, int]]] = {
            "recruiting": [{}],
            "training": [{}],
            "closing": [{"commit": 1}],
            "committed": [{"commit": 1}],
            "abandoned": [{"discard": 1}, {"commit": 1, "discard": 1}],  # the second: spoiled while closing
        }
        assert +self.ends in expected[self.state.phase]

    @invariant()
    def what_is_published_is_what_was_folded(self) -> None:
        match self.state:
            case Training(accepted=accepted) | Closing(accepted=accepted) | Abandoned(accepted=accepted):
                assert {client: one.weight for client, one in accepted.items()} == self.folds
            case Committed(closing):
                assert closing.aggregate.clients == tuple(sorted(self.folds))
                assert closing.aggregate.total_weight == sum(self.folds.values()) <= self.plan.total_weight_max
            case Recruiting():
                assert not self.folds
            case _:
                assert_never(self.state)

    @invariant()
    def an_open_round_is_still_wanted(self) -> None:
        if isinstance(self.state, Training):
            open_gaps = gaps(Roll(self.plan, self.state.cohort, self.state.accepted, self.state.declined))
            has_all = self.state.n_reported >= self.plan.target and len(self.folds) >= self.plan.minimum
            assert not has_all or any(gap.may_close for gap in open_gaps)
            assert not self.plan.coverage.strict or all(gap.may_close for gap in open_gaps), "hopeless, and still open"
            assert self.state.n_open > 0
            assert self.state.n_open == len(set(self.state.cohort) - set(self.folds) - set(self.state.declined))

    @invariant()
    def everyone_in_the_cohort_is_accounted_for_once(self) -> None:
        state = self.state.closing if isinstance(self.state, Committed) else self.state
        match state:
            case Training():
                assert not set(state.accepted) & set(state.declined)
                assert set(state.accepted) | set(state.declined) <= set(state.cohort)
            case Closing() | Abandoned():
                assert sorted([*state.accepted, *state.missing]) == sorted(state.cohort)
                assert all(state.missing.values())
                assert set(self.released or ()) <= set(state.missing)
            case Recruiting():
                pass

    @invariant()
    def weights_are_those_of_the_weighting(self) -> None:
        if isinstance(self.state, Training | Closing):
            for client, one in self.state.accepted.items():
                n_draws = self.state.cohort[client].draws
                assert one.weight == weight_of(self.plan.weighting, n_draws, one.work.sample_count)

    @invariant()
    def time_stands_in_order(self) -> None:
        match self.state:
            case Closing(opened_at=opened_at, closed_at=closed_at):
                assert 0 <= opened_at <= closed_at
            case Training(opened_at=opened_at):
                assert opened_at >= 0
            case Abandoned(closed_at=closed_at):
                assert closed_at >= 0
            case Recruiting() | Committed():
                pass


TestRoundMachine: Any = RoundMachine.TestCase
TestRoundMachine.settings = settings(stateful_step_count=30)


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
