"""What a secure round's machine must keep beside the laws of every round (`round_laws.py`), and its own walks.

The books here: who has said what and was heard (U1, U2, U4; U3 is who was accepted), who has refused the sum, and the
latest time that the machine has been told.
"""

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.aggregation.round.round_laws import CLIENTS, RoundLaws, anybody, claims, seldom
from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.machine import advance, hears, next_deadline, refuses
from umbel.aggregation.round.second_sum import OpenedSum
from umbel.aggregation.round.states import (
    Abandoned,
    Announce,
    Applied,
    Closing,
    Command,
    Commit,
    Committed,
    Declined,
    Event,
    Gathered,
    Invite,
    Recruiting,
    Reported,
    RoundState,
    SecureSide,
    Spoiled,
    Spoke,
    SumsBefore,
    Tick,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.parameters import parameters_for, roster_min, survivors_min
from umbel.aggregation.secagg.turns import Exchange, Phase, after_s
from umbel.aggregation.types import ClientId

PHASES = tuple(Phase)
SAID_IN = (Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS, Phase.CONSISTENCY_CHECK)
SILENT_STEPS = 6  # one deadline for each phase, and one to spare


def exchange_of(state: RoundState) -> Exchange | None:
    inner = state.closing if isinstance(state, Committed) else state
    return inner.exchange if isinstance(inner, Training | Closing) else None


def opened_of(state: RoundState) -> tuple[OpenedSum, ...]:
    """The sums over its model that were unmasked without a model coming of them."""
    match state:
        case Recruiting(before=SumsBefore(opened)):
            return opened
        case Training(secure=SecureSide() as secure) | Closing(secure=SecureSide() as secure):
            return secure.opened
        case Abandoned(secure=end):
            return end.opened
        case Committed(closing):
            return opened_of(closing)
        case _:
            return ()


class SecureRoundLaws(RoundLaws):
    """Drives one secure round."""

    def open_books(
        self, plan: RoundPlan, excluded: tuple[ClientId, ...] = (), opened: tuple[OpenedSum, ...] = ()
    ) -> None:
        super().open_books(plan, excluded)
        before = SumsBefore(opened) if opened else None
        self.state = Recruiting(plan, since=0.0, excluded=excluded, before=before)
        self.opened = opened
        self.needs_all = False
        self.said: dict[Phase, dict[ClientId, str]] = {phase: {} for phase in PHASES}
        self.sum_refused: dict[ClientId, str] = {}
        self.n_invited = 0

    @property
    def n_least(self) -> int:
        if self.needs_all:
            return self.n_invited
        n_keys, roster_least = len(self.said[Phase.ADVERTISE_KEYS]), roster_min(self.n_invited)
        has_roster = n_keys >= max(roster_least, MINIMUM_LEAST)
        survivors_least = survivors_min(n_keys, n_invited=self.n_invited) if has_roster else 0
        return max(self.plan.minimum, MINIMUM_LEAST, roster_least, survivors_least)

    @property
    def target(self) -> int:
        return self.n_invited if self.needs_all else self.plan.target

    @property
    def n_keys(self) -> int:
        return len(self.said[Phase.ADVERTISE_KEYS])

    @property
    def n_may_sign(self) -> int:
        """How many have signed who is in the sum, or may yet."""
        return len(self.counted.keys() - self.sum_refused.keys())

    @property
    def is_agreed(self) -> bool:
        """Whether so many have signed who is in the sum that it may be opened."""
        return self.n_keys >= MINIMUM_LEAST and len(self.said[Phase.CONSISTENCY_CHECK]) >= parameters_for(self.n_keys).t

    def gathered(self, *candidates: Candidate) -> Gathered:
        return Gathered(self.now, candidates, random=bytes(range(48)))

    def weight_of(self, before: Training, event: Reported) -> int:
        return 1  # its own is within the mask

    def times_left(self, state: RoundState, now: float) -> list[float]:
        left, exchange = super().times_left(state, now), exchange_of(state)
        is_timed = (
            exchange is not None and exchange.phase is not Phase.MASKED_INPUT and not isinstance(state, Committed)
        )
        return [*left, exchange.ends_at - now] if exchange is not None and is_timed else left

    # --- what clients say ---------------------------------------------------------------------------------------------

    @rule(client=anybody, turn=st.sampled_from(PHASES), early_s=st.sampled_from([0.0, 0.0, 3.0, 50.0]))
    def speak(self, client: ClientId, turn: Phase, early_s: float) -> None:
        """In or out of turn, with any clock."""
        self.send(Spoke(self.now - early_s, client, turn, f"{client} in {turn}"))

    @rule(client=anybody, turn=st.sampled_from(PHASES))
    def speak_twice(self, client: ClientId, turn: Phase) -> None:
        self.send(Spoke(self.now, client, turn, "one thing"))
        before = self.state
        self.send(Spoke(self.now, client, turn, "another"))
        assert self.state == before

    @rule(silent=st.one_of(st.just(set[ClientId]()), st.sets(anybody, max_size=3)), after_s=st.sampled_from([0.0, 0.1]))
    def others_say_what_is_awaited(self, silent: set[ClientId], after_s: float) -> None:
        """Most walks would end in the first phase without it."""
        exchange = exchange_of(self.state)
        if exchange is None:
            return
        for client in CLIENTS:
            if client in silent:
                continue
            self.now += after_s
            if exchange.phase is Phase.MASKED_INPUT:
                self.send(Reported(self.now, client, self.work((10, 4))))
            else:
                self.send(Spoke(self.now, client, exchange.phase, f"{client}"))

    @rule(claim=claims, silent=st.sets(anybody, max_size=2))
    def others_report(self, claim: tuple[int, int], silent: set[ClientId]) -> None:
        for client in CLIENTS:
            if client not in silent:
                self.send(Reported(self.now, client, self.work(claim)))

    @rule(does=seldom, late_s=st.sampled_from([0.0, 0.5, 100.0]))
    def nothing_is_said_until_the_deadline(self, does: bool, late_s: float) -> None:
        deadline = next_deadline(self.state)
        if not does or deadline is None or isinstance(self.state, Recruiting):
            return
        before = self.state
        self.now = max(self.now, deadline) + late_s
        self.send(Tick(self.now))
        assert self.state != before, "a deadline settles something"

    # --- the books ----------------------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        before = self.state
        is_heard = isinstance(event, Spoke) and hears(before, event)
        if isinstance(event, Spoke) and is_heard:
            assert event.client not in self.said[event.turn], "heard twice"
            self.said[event.turn][event.client] = event.word
        is_refusal = isinstance(event, Declined) and refuses(before, event)
        if isinstance(event, Declined) and is_refusal:
            assert event.client in self.counted.keys() - self.said[Phase.CONSISTENCY_CHECK].keys()
            assert event.client not in self.sum_refused, "heard twice"
            self.sum_refused[event.client] = event.reason
        super().send(event)
        if isinstance(event, Spoke) and not is_heard:
            assert self.state == before, "who is not heard changes nothing"
        if isinstance(before, Closing) and isinstance(event, Declined) and not is_refusal:
            assert self.state == before, "so does who has nothing to refuse"
        self.check_the_exchange(before, event)
        self.check_that_time_went_on(event)

    def carry_out(self, command: Command) -> None:
        super().carry_out(command)
        if isinstance(command, Invite):
            assert isinstance(self.state, Training)
            self.n_invited, self.needs_all = len(command.clients), self.state.needs_all
            assert not self.needs_all or self.opened, "any other round can do without some"
        if isinstance(command, Announce):
            came_through = [*(set(self.said[phase]) for phase in SAID_IN), set(self.counted)]
            assert set(command.clients) in came_through, "U1, U2, U3 or U4"
        if isinstance(command, Commit):
            assert isinstance(self.state, Closing)
            agreed, accepted = self.said[Phase.CONSISTENCY_CHECK].keys(), self.counted.keys()
            assert agreed <= accepted <= self.said[Phase.SHARE_KEYS].keys() <= self.said[Phase.ADVERTISE_KEYS].keys()
            assert self.is_agreed
            assert len(accepted) >= self.n_least

    def check_the_exchange(self, before: RoundState, event: Event) -> None:
        old, new = exchange_of(before), exchange_of(self.state)
        if old is None or new is None:
            assert old is None or isinstance(self.state, Abandoned), (
                "only a round that was given up forgets what was said"
            )
            return
        assert PHASES.index(new.phase) >= PHASES.index(old.phase)
        assert (new.attempt_id, new.opening) == (old.attempt_id, old.opening)
        assert new.began_at >= old.began_at
        assert (
            new.phase.is_before_inputs or new.phase is Phase.MASKED_INPUT or isinstance(self.state, Closing | Committed)
        )
        if isinstance(before, Closing) and isinstance(self.state, Committed):
            assert old.phase is Phase.UNMASKING, "a model is made of a sum that was opened"
        if new.phase in (Phase.CONSISTENCY_CHECK, Phase.UNMASKING) and not isinstance(self.state, Committed):
            most_s = after_s(self.plan.window_s)
            if new.phase is not old.phase:
                assert new.began_at < new.ends_at <= new.began_at + most_s + 1e-6
                assert event.now <= new.began_at

    def check_that_time_went_on(self, event: Event) -> None:
        """What is due is due after what was settled: nobody ticks in vain, nor for ever."""
        deadline = next_deadline(self.state)
        if isinstance(event, Tick) and not isinstance(self.state, Recruiting):
            assert deadline is None or deadline > event.now
        if isinstance(self.state, Training):
            assert deadline is not None
            assert self.state.opened_at <= deadline <= self.state.closes_at

    def check_the_end(self, before: RoundState, event: Event) -> None:
        super().check_the_end(before, event)
        if isinstance(before, Closing) and isinstance(self.state, Abandoned) and not isinstance(event, Spoiled):
            assert before.exchange is not None
            is_hopeless = isinstance(event, Declined) and self.n_may_sign < parameters_for(self.n_keys).t
            assert event.now >= before.exchange.ends_at or is_hopeless, "the sum was not waited for"
        if isinstance(before, Closing) and isinstance(self.state, Committed):
            assert isinstance(event, Applied)
        if isinstance(self.state, Closing) and self.needs_all:
            assert self.counted.keys() == self.state.cohort.keys(), "sites refuse a sum that lacks one"
        if isinstance(self.state, Abandoned) and not isinstance(before, Recruiting | Abandoned):
            self.check_who_is_blamed(before, self.state)

    def check_who_is_blamed(self, before: RoundState, ended: Abandoned) -> None:
        """Nobody is who has done what the phase that failed asked for, unless it declined; and each has its reason."""
        exchange = exchange_of(before)
        assert exchange is not None
        assert ended.secure.blamed.keys() <= ended.cohort.keys()
        assert all(ended.secure.blamed.values())
        assert all(
            ended.missing[client] == why for client, why in ended.secure.blamed.items() if client in ended.missing
        )
        did_it = self.counted if exchange.phase is Phase.MASKED_INPUT else self.said[exchange.phase]
        assert ended.secure.blamed.keys().isdisjoint(did_it.keys() - self.refused)
        assert ended.secure.blamed.keys().isdisjoint(self.sum_refused)
        assert ended.secure.refused == self.sum_refused

    def is_given_up_early(self, before: Training, event: Event) -> bool:
        """Too few are left who have kept pace with the phases, or the time of one of these was up."""
        assert before.exchange is not None
        assert isinstance(self.state, Abandoned)
        late = {client for client, why in self.state.missing.items() if why.startswith("it had not")}
        going_on = set(before.cohort) - self.refused - late
        is_timed = before.exchange.phase.is_before_inputs
        if self.needs_all and len(going_on) < self.n_least:
            return True
        return is_timed and (event.now >= before.exchange.ends_at or len(going_on) < self.n_least)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def ends_expected(self) -> list[dict[str, int]]:
        exchange = exchange_of(self.state)
        if exchange is not None and exchange.phase is Phase.CONSISTENCY_CHECK:
            return [{}]
        return super().ends_expected()

    @invariant()
    def what_was_opened_in_vain_is_not_forgotten(self) -> None:
        assert opened_of(self.state) == self.opened

    @invariant()
    def what_is_stored_is_what_was_heard(self) -> None:
        if (exchange := exchange_of(self.state)) is not None:
            for phase in SAID_IN:
                assert {c: exchange.said(c, phase) for c in exchange.who(phase)} == self.said[phase]
                assert exchange.who(phase) == tuple(sorted(self.said[phase]))

    @invariant()
    def nobody_is_waited_for_who_has_refused(self) -> None:
        """Neither by itself, nor where it has left too few."""
        exchange = exchange_of(self.state)
        if exchange is None or exchange.phase is not Phase.CONSISTENCY_CHECK:
            return
        assert exchange.refused == self.sum_refused
        assert self.n_may_sign >= parameters_for(self.n_keys).t
        assert len(self.said[Phase.CONSISTENCY_CHECK]) < self.n_may_sign, "all have signed who may"

    @invariant()
    def nobody_counts_who_has_not_shared(self) -> None:
        u1, u2, u4 = (self.said[phase].keys() for phase in SAID_IN)
        assert u4 <= self.counted.keys() <= u2 <= u1

    @invariant()
    def silence_ends_it(self) -> None:
        """Whatever was said: with ticks at its deadlines alone the round comes to an end, without a sum."""
        state, now = self.state, self.now
        if isinstance(state, Recruiting):
            return
        for _ in range(SILENT_STEPS):
            if (deadline := next_deadline(state)) is None:
                break
            now = max(now, deadline)
            state, commands = advance(state, Tick(now))
            assert self.is_agreed or not any(isinstance(command, Commit) for command in commands)
        assert isinstance(state, Committed | Abandoned)
