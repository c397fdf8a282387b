"""One federated round: its states, the events that move it, and the commands that follow. `machine.py` moves it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Generic, Literal, TypeAlias, TypeVar

from umbel.aggregation.algorithms.fednova import effective_steps, weighted_steps
from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS, FairReport, step_factor
from umbel.aggregation.canonical import later
from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.reports import Aggregate, Work
from umbel.aggregation.round.cohort import Expected, Member, PassedOver
from umbel.aggregation.round.second_sum import OpenedSum
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.types import ClientId


@dataclass(frozen=True, slots=True)
class Accepted:
    """A report that counts."""

    weight: int  # in the sum
    work: Work


# --- what only secure rounds need -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SumsBefore:
    """Sums over this model that were unmasked but made no new model; they restrict the next attempt's cohort."""

    opened: tuple[OpenedSum, ...]  # oldest first (`second_sum.py`)
    liars: tuple[ClientId, ...] = ()  # the clients of `Recruiting.avoid` that broke the protocol in the last of them


@dataclass(frozen=True, slots=True)
class SecureSide:
    """The part of a state that only a round with masked updates has."""

    exchange: Exchange
    opened: tuple[OpenedSum, ...] = ()  # as in `SumsBefore`
    why: str = ""  # how `opened` restricted the cohort, in words
    needs_all: bool = False  # whether the round fails without any one of its clients

    def after(self, exchange: Exchange) -> "SecureSide":
        return replace(self, exchange=exchange)


@dataclass(frozen=True, slots=True)
class SecureEnd:
    """How a secure round was abandoned."""

    was_revealed: bool = False  # whether clients may have revealed shares, so that the coordinator may know the sum
    blamed: Mapping[ClientId, str] = field(
        default_factory=dict[ClientId, str]
    )  # with reasons; may have accepted reports
    refused: Mapping[ClientId, str] = field(
        default_factory=dict[ClientId, str]
    )  # that did not sign the list, with reasons
    opened: tuple[OpenedSum, ...] = ()  # as in `SumsBefore`, without this round's own sum


# --- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recruiting:
    """Waiting for clients."""

    plan: RoundPlan
    since: float  # patience counts from here
    why: str = "no client has checked in yet"  # what it waits for
    not_before: float = 0.0  # no cohort is drawn earlier, after abandoned attempts (`retry.py`)
    avoid: tuple[ClientId, ...] = ()  # drawn last
    excluded: tuple[ClientId, ...] = ()  # never drawn: they trained the model that is to be evaluated
    before: SumsBefore | None = None
    is_hurried: bool = later(False)  # an operator has ordered to start with the clients that wait
    missing: tuple[ClientId, ...] = later(())  # expected clients that it waits for; shown, not stored
    waits_until: float | None = later(None)  # the end of its patience, if not by the plan; shown, not stored
    phase: Literal["recruiting"] = "recruiting"


@dataclass(frozen=True, slots=True)
class Training:
    """The window is open. A client is in at most one of `accepted` and `declined`."""

    plan: RoundPlan
    cohort: Mapping[ClientId, Member]
    opened_at: float
    accepted: Mapping[ClientId, Accepted] = field(default_factory=dict[ClientId, Accepted])
    declined: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0  # time without a coordinator that takes reports (`Outage`); the window excludes it
    back_at: float = 0.0  # the end of the last outage
    secure: SecureSide | None = None
    phase: Literal["training"] = "training"

    @property
    def exchange(self) -> Exchange | None:
        return self.secure.exchange if self.secure else None

    @property
    def keys(self) -> Exchange | None:
        """The exchange while clients advertise and share keys, before any update counts."""
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
    """No more reports count; the new model is being made, in a secure round after its sum is unmasked."""

    plan: RoundPlan
    cohort: Mapping[ClientId, Member]
    accepted: Mapping[ClientId, Accepted]
    missing: Mapping[ClientId, str]  # why each client's work does not count
    late: Outcome  # of reports that come now
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
        """Whether clients may have revealed shares, so that the coordinator may know a secure sum."""
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

    def factor(self, training: TrainingPlan) -> float:
        """By what the mean change of a plain round is multiplied: FedNova's tau_eff, or q-FedAvg's c; 1 under other
        algorithms. Of a masked round, the words of its sum say it (`Totals`).
        """
        if (terms := training.fair_terms) is not None:
            found = ((one.weight, one.work.metrics) for one in self.accepted.values())
            return step_factor([FairReport(w, said[START_LOSS], said[CHANGE_NORM]) for w, said in found], terms)
        if not training.is_normalised:
            return 1.0
        steps = weighted_steps((one.weight, one.work.steps_done) for one in self.accepted.values())
        return effective_steps(steps, self.aggregate.total_weight)


@dataclass(frozen=True, slots=True)
class Committed:
    """The round has made a new model version."""

    closing: Closing
    model_sha256: str
    phase: Literal["committed"] = "committed"


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The round made no model. No report counts; the next attempt asks a new cohort."""

    plan: RoundPlan
    reason: str
    cohort: Mapping[ClientId, Member]
    accepted: Mapping[ClientId, Accepted]
    missing: Mapping[ClientId, str]
    opened_at: float  # of its window; `closed_at` if that never opened
    closed_at: float
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0
    secure: SecureEnd = field(default_factory=SecureEnd)
    phase: Literal["abandoned"] = "abandoned"


RoundState: TypeAlias = Recruiting | Training | Closing | Committed | Abandoned

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gathered:
    """These clients wait for work now (all of them, not only the new ones)."""

    now: float
    candidates: tuple[Candidate, ...]
    random: bytes = field(default=b"", repr=False)  # of a secure round: 48 unguessable bytes
    removed: frozenset[ClientId] = frozenset()  # clients of earlier sums (`SumsBefore`) that left the fleet
    expected: Expected | None = None  # clients that the round waits for; None: the plan's patience is all


@dataclass(frozen=True, slots=True)
class Revealed:
    """The revealed shares of a secure round at the replica that unmasks its sum, which alone knows them."""

    clients: tuple[ClientId, ...]  # that revealed shares
    lacking: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])  # dealers to blame, with reasons
    withheld: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])  # holders to blame, with reasons


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float
    revealed: Revealed | None = None  # if the time to reveal shares is over


@dataclass(frozen=True, slots=True)
class Reported:
    """A client's report, whose update is stored and has passed every check."""

    now: float
    client: ClientId
    work: Work


@dataclass(frozen=True, slots=True)
class Spoke:
    """A client's message in a phase of a secure round, which has passed every check."""

    now: float
    client: ClientId
    turn: Phase
    word: str  # the message as in `Spoken`


@dataclass(frozen=True, slots=True)
class Declined:
    """A client will not report; or, in a secure round that has closed, not sign the list of clients in the sum."""

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
class Hurried:
    """An operator orders the round to start with the clients that wait."""

    now: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """An operator resumes a paused run: patience counts from now."""

    now: float


@dataclass(frozen=True, slots=True)
class Outage:
    """From `since` to `now` no coordinator could take reports. Reported again, or by several, it counts once."""

    since: float
    now: float


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing has been heard of these clients for longer than `silence.py` allows. It is no state: each event counts
    alone, and a client that is heard again is not in the next one."""

    now: float
    clients: frozenset[ClientId]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """No model can be made: an accepted update was lost or damaged in store, or the step leaves the model's range."""

    now: float
    reason: str
    blamed: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])  # that dealt wrong shares, with reasons


Event: TypeAlias = (
    Gathered | Tick | Reported | Spoke | Declined | Applied | Stopped | Hurried | Resumed | Outage | Silent | Spoiled
)

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
    """Tell a client the outcome of its report."""

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
    """A secure round is in its next phase: these clients can fetch their messages for it."""

    clients: tuple[ClientId, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Make the new model from the sum (in a secure round after unmasking it), store it, then send `Applied`."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Discard the sum and begin the next attempt."""

    reason: str


Command: TypeAlias = Invite | Fold | Answer | Release | Announce | Commit | Discard
Step: TypeAlias = tuple[RoundState, tuple[Command, ...]]


# --- maps that grow by an entry in constant time, so that a step of a round copies no cohort ------------------------

Key = TypeVar("Key")
Value = TypeVar("Value")


class GrowingMap(Mapping[Key, Value], Generic[Key, Value]):
    """A mapping in the order of insertion; `with_entry` returns a larger one and does not change this one.

    Maps that grow from one another share one dictionary; each sees only its own first entries. The largest of them adds
    to it. Any other map copies its entries first. Not thread-safe.
    """

    __slots__ = ("_n", "_shared")

    def __init__(self, entries: Mapping[Key, Value] | None = None) -> None:
        self._shared: dict[Key, tuple[int, Value]] = {}
        for n, (key, value) in enumerate((entries or {}).items()):
            self._shared[key] = (n, value)
        self._n = len(self._shared)

    def with_entries(self, more: Mapping[Key, Value]) -> "GrowingMap[Key, Value]":
        """This map with more entries. Raises `ValueError` for a key that it has."""
        grown: GrowingMap[Key, Value] = GrowingMap.__new__(GrowingMap)
        is_newest = len(self._shared) == self._n
        grown._shared = shared = self._shared if is_newest else dict(islice(self._shared.items(), self._n))
        if shared and (twice := [key for key in more if key in shared]):
            raise ValueError(f"the map has {twice[0]!r} already")
        for n, (key, value) in enumerate(more.items(), self._n):
            shared[key] = (n, value)
        grown._n = len(shared)
        return grown

    def __getitem__(self, key: Key) -> Value:
        n, value = self._shared[key]
        if n >= self._n:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        found = self._shared.get(key)  # type: ignore[arg-type]  # any object may be looked up
        return found is not None and found[0] < self._n

    def __iter__(self) -> Iterator[Key]:
        return islice(iter(self._shared), self._n)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"GrowingMap({dict(self)!r})"


def with_entries(entries: Mapping[Key, Value], more: Mapping[Key, Value]) -> Mapping[Key, Value]:
    """`entries` and `more`. As fast as `more` is short if `entries` is a `GrowingMap`, as what this returns always is.

    Raises `ValueError` for a key in both.
    """
    return (entries if isinstance(entries, GrowingMap) else GrowingMap(entries)).with_entries(more)


def with_entry(entries: Mapping[Key, Value], key: Key, value: Value) -> Mapping[Key, Value]:
    """`entries` with one more, as `with_entries`."""
    return with_entries(entries, {key: value})
