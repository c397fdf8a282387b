"""One federated round: its states, the events that move it, and the commands that follow. `machine.py` moves it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.reports import Aggregate, Work
from umbel.aggregation.round.cohort import Member, PassedOver
from umbel.aggregation.round.second_sum import OpenedSum
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.types import ClientId


@dataclass(frozen=True, slots=True)
class Accepted:
    """A report that counts: its weight in the sum and what the client said of it."""

    weight: int
    work: Work


# --- what only secure rounds need -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SumsBefore:
    """Sums over this very model that were unmasked but made no new model; they restrict whom the next attempt asks.

    `opened`: these sums, oldest first (`second_sum.py`). `liars`: clients that broke the protocol in the last of them;
    they are among `Recruiting.avoid`.
    """

    opened: tuple[OpenedSum, ...]
    liars: tuple[ClientId, ...] = ()


@dataclass(frozen=True, slots=True)
class SecureSide:
    """What a round adds whose updates are masked.

    `exchange`: who has said what, and whose turn it is. `opened`: as in `SumsBefore`. If there are any, `why` says in
    words whom the round asks for that reason, and `needs_all` whether it fails without any one of them.
    """

    exchange: Exchange
    opened: tuple[OpenedSum, ...] = ()
    why: str = ""
    needs_all: bool = False

    def after(self, exchange: Exchange) -> "SecureSide":
        """The same after the exchange has gone on."""
        return replace(self, exchange=exchange)


@dataclass(frozen=True, slots=True)
class SecureEnd:
    """How a secure round was abandoned.

    `was_revealed`: clients may have revealed shares, so the coordinator may know the sum. `blamed`: client -> why the
    round failed by it; accepted reports do not protect from that. `refused`: client -> why it did not sign who is in
    the sum. `opened`: as in `SumsBefore`, without this round's own sum.
    """

    was_revealed: bool = False
    blamed: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])
    refused: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])
    opened: tuple[OpenedSum, ...] = ()


# --- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recruiting:
    """Waiting for clients. `why`: what it is waiting for, in words.

    After abandoned attempts (`retry.py`) no cohort is drawn before `not_before`, where patience starts, too. Clients to
    `avoid` are drawn last. `excluded` clients are never drawn: they trained the model that is to be evaluated.
    """

    plan: RoundPlan
    since: float
    why: str = "no client has checked in yet"
    not_before: float = 0.0
    avoid: tuple[ClientId, ...] = ()
    excluded: tuple[ClientId, ...] = ()
    before: SumsBefore | None = None
    phase: Literal["recruiting"] = "recruiting"


@dataclass(frozen=True, slots=True)
class Training:
    """The window is open. A client is in at most one of `accepted` and `declined`.

    `away_s`: how long no coordinator could take reports since it opened (`Outage`), which the window does not count.
    `back_at`: when the last outage ended. `secure`: of a round whose updates are masked.
    """

    plan: RoundPlan
    cohort: Mapping[ClientId, Member]
    opened_at: float
    accepted: Mapping[ClientId, Accepted] = field(default_factory=dict[ClientId, Accepted])
    declined: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0
    back_at: float = 0.0
    secure: SecureSide | None = None
    phase: Literal["training"] = "training"

    @property
    def exchange(self) -> Exchange | None:
        return self.secure.exchange if self.secure else None

    @property
    def keys(self) -> Exchange | None:
        """The exchange while clients advertise and share keys, which is before any update counts."""
        return exchange if (exchange := self.exchange) and exchange.phase.is_before_inputs else None

    @property
    def needs_all(self) -> bool:
        """Whether the round fails without any one of its clients."""
        return self.secure is not None and self.secure.needs_all

    @property
    def target(self) -> int:
        """Reports at which it closes, counted in draws."""
        return sum(member.draws for member in self.cohort.values()) if self.needs_all else self.plan.target

    @property
    def closes_at(self) -> float:
        return self.opened_at + self.plan.window_s + self.away_s

    @property
    def n_reported(self) -> int:
        """Reports in, counted in draws."""
        if self.plan.weighting is Weighting.SAMPLES:
            return len(self.accepted)  # each client is drawn once; this is asked after every report
        return sum(self.cohort[client].draws for client in self.accepted)

    @property
    def n_open(self) -> int:
        """Clients that may still report."""
        return len(self.cohort) - len(self.accepted) - len(self.declined)


@dataclass(frozen=True, slots=True)
class Closing:
    """No more reports; the new model is being made. `missing`: client -> why its work does not count.

    `secure`: of a round whose sum must be unmasked first, which may fail. `away_s`, `back_at`: as in `Training`.
    """

    plan: RoundPlan
    cohort: Mapping[ClientId, Member]
    accepted: Mapping[ClientId, Accepted]
    missing: Mapping[ClientId, str]
    late: Outcome
    reason: str
    opened_at: float
    closed_at: float
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0
    back_at: float = 0.0
    secure: SecureSide | None = None
    phase: Literal["closing"] = "closing"

    @property
    def exchange(self) -> Exchange | None:
        return self.secure.exchange if self.secure else None

    @property
    def is_unmasking(self) -> bool:
        """Whether clients may have begun to reveal shares, so that the coordinator may know a secure sum."""
        exchange = self.exchange
        return exchange is not None and exchange.phase is Phase.UNMASKING

    @property
    def aggregate(self) -> Aggregate:
        work = [accepted.work for accepted in self.accepted.values()]
        return Aggregate(
            clients=tuple(sorted(self.accepted)),
            total_weight=sum(accepted.weight for accepted in self.accepted.values()),
            sample_count=sum(done.sample_count for done in work),
            n_partial=sum(done.is_partial for done in work),
        )


@dataclass(frozen=True, slots=True)
class Committed:
    """The round has made a new model version. `closing`: what went into it."""

    closing: Closing
    model_sha256: str
    phase: Literal["committed"] = "committed"


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The round made no model. Nothing that was reported counts; the next attempt asks a fresh cohort.

    `opened_at`: when its window opened, or `closed_at` if it never did. `secure`: of a secure round.
    """

    plan: RoundPlan
    reason: str
    cohort: Mapping[ClientId, Member]
    accepted: Mapping[ClientId, Accepted]
    missing: Mapping[ClientId, str]
    opened_at: float
    closed_at: float
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0
    secure: SecureEnd = field(default_factory=SecureEnd)
    phase: Literal["abandoned"] = "abandoned"


RoundState: TypeAlias = Recruiting | Training | Closing | Committed | Abandoned

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gathered:
    """These clients wait for work now (all of them, not only the new ones).

    `random`: of a secure round, 48 bytes that nobody can guess. `removed`: who of the sums that were opened in vain is
    not in the fleet any more.
    """

    now: float
    candidates: tuple[Candidate, ...]
    random: bytes = field(default=b"", repr=False)
    removed: frozenset[ClientId] = frozenset()


@dataclass(frozen=True, slots=True)
class Revealed:
    """Which shares of a secure round have come to the replica that unmasks its sum; nobody else knows.

    `clients`: whose. `lacking`: dealer -> at whom its shares did not open, in words; `withheld`: client -> of whom it
    has revealed no share though others have, in words (`Lacking`, secagg/unmasking.py).
    """

    clients: tuple[ClientId, ...]
    lacking: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])
    withheld: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `revealed`: where the time to reveal shares is up."""

    now: float
    revealed: Revealed | None = None


@dataclass(frozen=True, slots=True)
class Reported:
    """A client's update is stored and has passed every check; `work`: what it says of it, or of a model it measured."""

    now: float
    client: ClientId
    work: Work


@dataclass(frozen=True, slots=True)
class Spoke:
    """A client's message in a phase of a secure round has come and passed every check. `word`: as `Spoken` keeps it."""

    now: float
    client: ClientId
    turn: Phase
    word: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A client will not report; or, of a secure round that has closed, will not sign who is in the sum."""

    now: float
    client: ClientId
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The new model is stored."""

    now: float
    model_sha256: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """An operator ends the round."""

    now: float
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """An operator lets a paused run go on: patience counts from now."""

    now: float


@dataclass(frozen=True, slots=True)
class Outage:
    """From `since` to `now` nobody could take reports: no coordinator was at work, or none had its database.

    Told again, or by several coordinators, it counts once.
    """

    since: float
    now: float


@dataclass(frozen=True, slots=True)
class Spoiled:
    """No model can be made: an accepted update was lost or damaged in store, or the step leaves the model's range.

    `blamed`: client -> why, where it is by its doing: it has dealt shares of which its secret cannot be made.
    """

    now: float
    reason: str
    blamed: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])


Event: TypeAlias = Gathered | Tick | Reported | Spoke | Declined | Applied | Stopped | Resumed | Outage | Spoiled

# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invite:
    """Hand an assignment to each of these clients."""

    clients: tuple[ClientId, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Add this client's stored update to the sum."""

    client: ClientId
    weight: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell a client what became of its report."""

    client: ClientId
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell these clients to stop: the round no longer needs them."""

    clients: tuple[ClientId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """A secure round has come to its next phase: these clients can fetch what they need for it."""

    clients: tuple[ClientId, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Make the new model from the sum, store it, then say `Applied`. Only rounds of training have one to make.

    The sum of a secure round is unmasked before, with the shares that its clients reveal now.
    """


@dataclass(frozen=True, slots=True)
class Discard:
    """Throw the sum away and begin the next attempt."""

    reason: str


Command: TypeAlias = Invite | Fold | Answer | Release | Announce | Commit | Discard
