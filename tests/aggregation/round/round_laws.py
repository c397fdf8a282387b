"""The laws of the round machine, held against everything a network can do to it (hypothesis, stateful).

One set of rules and laws for every kind of round. A machine of it keeps its own books (what was accepted, who was
folded, who was answered what, how often the round ended) from the commands, as the coordinator would, and compares them
with the state after every step.
"""

from collections import Counter
from itertools import pairwise
from typing import assert_never

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import RoundPlan, Task
from umbel.aggregation.reports import EvaluationDone, Work, WorkDone
from umbel.aggregation.round.coverage import Gap, Roll, gaps
from umbel.aggregation.round.machine import advance, takes
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
    Discard,
    Event,
    Fold,
    Gathered,
    Invite,
    Outage,
    Recruiting,
    Release,
    Reported,
    Resumed,
    RoundState,
    Silent,
    Spoiled,
    Stopped,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate, weight_of
from umbel.aggregation.types import ClientId

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

claims = st.tuples(st.integers(1, 100), st.integers(1, 4))  # samples, and steps of four, or the loss that was measured
anybody = st.sampled_from([*CLIENTS, STRANGER])
seldom = st.integers(0, 5).map(lambda n: n == 5)  # not `assume`: it would throw away all the steps before


class RoundLaws(RuleBasedStateMachine):
    """Drives one round and keeps the coordinator's books beside it. A subclass begins it."""

    state: RoundState
    now: float

    def open_books(self, plan: RoundPlan, excluded: tuple[ClientId, ...] = ()) -> None:
        self.now = 0.0
        self.plan = plan
        self.excluded = excluded
        self.state = Recruiting(plan, since=0.0, excluded=excluded)
        self.counted: dict[ClientId, tuple[int, Work]] = {}
        self.folds: dict[ClientId, int] = {}
        self.answers: dict[ClientId, Answer] = {}
        self.ends: Counter[str] = Counter()
        self.released: tuple[ClientId, ...] = ()
        self.refused: set[ClientId] = set()

    def work(self, claim: tuple[int, int]) -> Work:
        """What a client says, that is asked for what this round asks."""
        if self.plan.task is Task.EVALUATION:
            return EvaluationDone(claim[0], {"loss": float(claim[1])})
        return WorkDone(claim[0], claim[1], 4, "0" * 64)

    @property
    def n_least(self) -> int:
        """Without so many reports it makes nothing; a canary is about who is missing, too."""
        return 0 if self.plan.task is Task.CANARY else self.plan.minimum

    @property
    def target(self) -> int:
        """Reports at which it closes before its window is over."""
        return self.plan.target

    def gathered(self, *candidates: Candidate) -> Gathered:
        return Gathered(self.now, candidates)

    def weight_of(self, before: Training, event: Reported) -> int:
        """What a report that counts must weigh."""
        return weight_of(self.plan.weighting, before.cohort[event.client].draws, event.work.sample_count)

    def times_left(self, state: RoundState, now: float) -> list[float]:
        """What a round has left for others to come, in seconds."""
        return [state.closes_at - now] if isinstance(state, Training) else []

    # --- what the network and the clock do ----------------------------------------------------------------------------

    @rule(n=st.integers(0, 6), counts=st.lists(st.integers(0, 200), min_size=6, max_size=6))
    def gather(self, n: int, counts: list[int]) -> None:
        self.send(self.gathered(*map(Candidate, CLIENTS[:n], counts, TIERS)))

    @rule()
    def gather_everybody(self) -> None:
        self.send(self.gathered(*map(Candidate, CLIENTS, [10] * 6, TIERS)))

    @precondition(lambda self: isinstance(self.state, Recruiting))
    @rule(n=st.sampled_from([0, 1, 2, 6]))
    def wait_for_clients_until_patience_is_over(self, n: int) -> None:
        assert isinstance(self.state, Recruiting)
        self.now = max(self.now, self.state.since + self.plan.patience_s)
        self.send(self.gathered(*map(Candidate, CLIENTS[:n], [10] * n, TIERS)))
        able = set(CLIENTS[:n]) - set(self.excluded)
        if self.plan.task is Task.EVALUATION and len(able) < self.plan.minimum:
            assert isinstance(self.state, Abandoned), "a measurement holds up no training"

    @rule(client=anybody, claim=claims)
    def report(self, client: ClientId, claim: tuple[int, int]) -> None:
        self.send(Reported(self.now, client, self.work(claim)))

    @rule(client=anybody, first=claims, second=claims)
    def report_twice(self, client: ClientId, first: tuple[int, int], second: tuple[int, int]) -> None:
        self.send(Reported(self.now, client, self.work(first)))
        answer, counted, state = self.answers[client], dict(self.counted), self.state
        self.send(Reported(self.now, client, self.work(second)))
        assert (self.answers[client], self.counted, self.state) == (answer, counted, state)

    @rule(client=anybody, claim=claims, early_s=st.floats(0, 50))
    def report_with_a_clock_that_ran_backward(self, client: ClientId, claim: tuple[int, int], early_s: float) -> None:
        self.send(Reported(self.now - early_s, client, self.work(claim)))

    @precondition(lambda self: isinstance(self.state, Training))
    @rule(client=anybody, claim=claims)
    def report_late(self, client: ClientId, claim: tuple[int, int]) -> None:
        assert isinstance(self.state, Training)
        accepted = client in self.state.accepted
        late_at = self.state.closes_at
        self.send(Reported(late_at, client, self.work(claim)))
        self.now = max(self.now, late_at)
        assert accepted == (client in self.counted), "a late report counts"

    @rule(client=anybody)
    def decline(self, client: ClientId) -> None:
        self.send(Declined(self.now, client, "low battery"))

    @rule(some=st.sets(anybody))
    def everybody_else_declines(self, some: set[ClientId]) -> None:
        for client in (*CLIENTS, STRANGER):
            if client not in some:
                self.send(Declined(self.now, client, "low battery"))

    @rule(clients=st.sets(anybody))
    def nothing_is_heard_of(self, clients: set[ClientId]) -> None:
        before = self.state
        self.send(Silent(self.now, frozenset(clients)))
        if self.state == before or isinstance(self.state, Closing):
            return
        assert isinstance(before, Training), "silence only changes a round that is open"
        assert isinstance(self.state, Training), "silence abandons no round"
        assert before.keys is not None, "it closes a round whose keys are exchanged, or changes nothing"
        assert self.state.exchange is not None
        assert self.state.exchange.phase is not before.keys.phase, "it ends a phase of keys"

    @rule(spared=st.sets(anybody, max_size=1))
    def nothing_is_heard_of_those_who_are_missing(self, spared: set[ClientId]) -> None:
        self.nothing_is_heard_of(set(CLIENTS) - spared)

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
    def resume(self) -> None:
        before = self.state
        self.send(Resumed(self.now))
        assert self.state == before or isinstance(before, Recruiting), "a round that is open takes its own time"

    @rule(down_s=st.floats(0, 100), up_s=st.floats(0, 10))
    def nobody_is_there_for_a_while(self, down_s: float, up_s: float) -> None:
        """Its reports' time is left as it was, however often the outage is told."""
        before, since = self.state, self.now
        self.now += down_s
        for _ in range(2):
            self.send(Outage(since, self.now))
        left = self.times_left(before, since)
        assert self.state.phase == before.phase
        assert self.times_left(self.state, self.now) == pytest.approx(left, abs=1e-6)
        assert left or self.state == before or isinstance(before, Recruiting)
        self.now += up_s

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
        before, is_taken = self.state, isinstance(event, Reported) and takes(self.state, event)
        self.state, commands = advance(before, event)
        if isinstance(event, Reported) and isinstance(before, Training) and is_taken:
            assert event.client not in self.counted, f"{event.client} counts twice"
            self.counted[event.client] = self.weight_of(before, event), event.work
        if isinstance(event, Declined) and isinstance(before, Training) and event.client in before.cohort:
            self.refused |= {event.client} - {*self.counted, *self.released}
        for command in commands:
            self.carry_out(command)
        assert self.state.phase == before.phase or (before.phase, self.state.phase) in ALLOWED
        if isinstance(before, Committed | Abandoned):
            assert self.state == before, "a terminal phase absorbs every event"
        if isinstance(event, Reported):
            assert [c.client for c in commands if isinstance(c, Answer)] == [event.client], "each report has its answer"
            is_folded = is_taken and self.plan.task is Task.TRAINING
            assert is_folded == any(isinstance(c, Fold) for c in commands), "checked exactly when it counts"
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
                if client in self.counted and not self.ends["discard"]:
                    assert outcome is Outcome.ACCEPTED
                if outcome is Outcome.ACCEPTED:
                    assert client in self.counted, f"{client} was told that its report counts, and it does not"
                self.answers[client] = command
            case Release(clients):
                assert not set(clients) & set(self.released), "released twice"
                assert isinstance(self.state, Training | Closing | Abandoned)
                assert clients == tuple(client for client in self.state.cohort if client in clients)
                self.released += clients
            case Announce(clients):
                assert clients, "somebody can go on"
            case Commit():
                self.ends["commit"] += 1
            case Discard(reason):
                assert reason
                self.ends["discard"] += 1
            case Invite(clients):
                assert isinstance(self.state, Training)
                assert clients == tuple(self.state.cohort)
                assert not set(clients) & set(self.excluded), "who trained the model is asked to measure it"
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
        if isinstance(before, Recruiting) and isinstance(self.state, Abandoned) and not isinstance(event, Stopped):
            assert self.plan.task is Task.EVALUATION, "only a measurement is given up for want of clients"
            assert event.now >= before.since + self.plan.patience_s
        if not isinstance(before, Training) or isinstance(self.state, Training):
            return
        assert isinstance(self.state, Closing | Abandoned)
        n_reported = sum(before.cohort[client].draws for client in self.counted)
        heard = {*self.counted, *(c for c in before.declined), *([event.client] if isinstance(event, Declined) else [])}
        silent = event.clients if isinstance(event, Silent) else frozenset[ClientId]()
        all_heard = set(before.cohort) <= heard | silent
        is_over = event.now >= before.closes_at
        is_strict, known = self.plan.coverage.strict, self.gaps_when_it_ended(before, event)
        if isinstance(self.state, Closing):
            assert len(self.counted) >= self.n_least
            assert n_reported >= self.target or is_over or all_heard
            # Who was waited for, and fell silent, is late: the round wanted its report for coverage.
            is_surplus = n_reported >= self.target and not is_over and not isinstance(event, Silent)
            assert self.state.late is (Outcome.SURPLUS if is_surplus else Outcome.LATE)
            assert not (is_strict and known), "strict coverage was not met, and the round closed"
            assert is_over or all_heard or not any(gap.may_close for gap in known), (
                "what may still come was not awaited"
            )
            assert all(gap.what in self.state.reason for gap in known), "what is not covered is named"
        elif not isinstance(event, Stopped):
            is_hopeless = is_strict and not all(gap.may_close for gap in known)
            assert len(self.counted) < self.n_least or (is_strict and known)
            assert is_over or all_heard or is_hopeless or self.is_given_up_early(before, event)
        unheard = set(before.cohort) - set(self.counted) - self.refused
        assert set(self.released) == unheard, "exactly the unheard are told to stop"

    def is_given_up_early(self, before: Training, event: Event) -> bool:
        """Whether it could not have come to a good end, though some might still have reported."""
        return False

    def gaps_when_it_ended(self, before: Training, event: Event) -> tuple[Gap, ...]:
        declined = {name: why for name, why in before.declined.items() if name not in self.counted}
        if isinstance(event, Declined) and event.client in before.cohort and event.client not in self.counted:
            declined[event.client] = event.reason
        return gaps(Roll(self.plan, before.cohort, self.counted, declined))

    def ends_expected(self) -> list[dict[str, int]]:
        """What may have been ordered by now, so that the round ends."""
        ends: dict[str, list[dict[str, int]]] = {
            "recruiting": [{}],
            "training": [{}],
            "closing": [{"commit": 1}],
            "committed": [{"commit": 1}],
            "abandoned": [{"discard": 1}, {"commit": 1, "discard": 1}],  # the second: spoiled while closing
        }
        return ends[self.state.phase]

    @invariant()
    def the_round_ends_once(self) -> None:
        assert +self.ends in self.ends_expected()

    @invariant()
    def no_accepted_report_is_lost_or_changed(self) -> None:
        match self.state:
            case Training(accepted=accepted) | Closing(accepted=accepted) | Abandoned(accepted=accepted):
                assert {client: (one.weight, one.work) for client, one in accepted.items()} == self.counted
            case Committed(closing):
                weights, works = [one[0] for one in self.counted.values()], [one[1] for one in self.counted.values()]
                assert closing.aggregate.clients == tuple(sorted(self.counted))
                assert closing.aggregate.total_weight == sum(weights) <= self.plan.total_weight_max
                assert closing.aggregate.sample_count == sum(work.sample_count for work in works)
                assert closing.aggregate.n_partial == sum(work.is_partial for work in works)
            case Recruiting():
                assert not self.counted
            case _:
                assert_never(self.state)

    @invariant()
    def what_is_folded_is_what_counts_and_only_training_folds(self) -> None:
        weights = {client: weight for client, (weight, _) in self.counted.items()}
        assert self.folds == (weights if self.plan.task is Task.TRAINING else {})

    @invariant()
    def an_open_round_is_still_wanted(self) -> None:
        if isinstance(self.state, Training):
            open_gaps = gaps(Roll(self.plan, self.state.cohort, self.state.accepted, self.state.declined))
            has_all = self.state.n_reported >= self.target and len(self.counted) >= self.n_least
            assert not has_all or any(gap.may_close for gap in open_gaps)
            assert not self.plan.coverage.strict or all(gap.may_close for gap in open_gaps), "hopeless, and still open"
            assert self.state.n_open > 0
            assert self.state.n_open == len(set(self.state.cohort) - set(self.counted) - set(self.state.declined))

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
                assert set(self.released) <= set(state.missing)
            case Recruiting():
                pass

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
