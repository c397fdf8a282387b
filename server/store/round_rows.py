"""Converts a round's state to its stored form: a head as JSON, and one row for each client of the cohort. Pure.

A report changes only the head and one client's row, so the bytes written do not grow with the cohort. The head's JSON
is flat: it has the fields of secure rounds too, with their defaults in plain rounds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, assert_never

from pydantic import Discriminator, Field, TypeAdapter

from umbel.aggregation.canonical import later
from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import Work
from umbel.aggregation.round.cohort import Member, PassedOver
from umbel.aggregation.round.second_sum import OpenedSum
from umbel.aggregation.round.states import (
    Abandoned,
    Accepted,
    Closing,
    Committed,
    Recruiting,
    RoundState,
    SecureEnd,
    SecureSide,
    SumsBefore,
    Training,
)
from umbel.aggregation.secagg.turns import Exchange, Spoken
from umbel.aggregation.types import ClientId

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Copy = TypeVar("Copy", bound="DataclassInstance")
Fact = TypeVar("Fact")
Facts: TypeAlias = Mapping[ClientId, Fact]


# --- the head ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredRecruiting:
    plan: RoundPlan
    since: float
    why: str = "no client has checked in yet"
    not_before: float = 0.0
    avoid: tuple[ClientId, ...] = ()
    excluded: tuple[ClientId, ...] = ()
    opened: tuple[OpenedSum, ...] = ()
    liars: tuple[ClientId, ...] = ()
    is_hurried: bool = later(False)
    phase: Literal["recruiting"] = "recruiting"


@dataclass(frozen=True, slots=True)
class StoredTraining:
    plan: RoundPlan
    cohort: Facts[Member]
    opened_at: float
    accepted: Facts[Accepted] = field(default_factory=dict[ClientId, Accepted])
    declined: Facts[str] = field(default_factory=dict[ClientId, str])
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0
    back_at: float = 0.0
    exchange: Exchange | None = None
    opened: tuple[OpenedSum, ...] = ()
    why: str = ""
    needs_all: bool = False
    phase: Literal["training"] = "training"


@dataclass(frozen=True, slots=True)
class StoredClosing:
    plan: RoundPlan
    cohort: Facts[Member]
    accepted: Facts[Accepted]
    missing: Facts[str]
    late: Outcome
    reason: str
    opened_at: float
    closed_at: float
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0
    back_at: float = 0.0
    exchange: Exchange | None = None
    opened: tuple[OpenedSum, ...] = ()
    phase: Literal["closing"] = "closing"


@dataclass(frozen=True, slots=True)
class StoredCommitted:
    closing: StoredClosing
    model_sha256: str
    phase: Literal["committed"] = "committed"


@dataclass(frozen=True, slots=True)
class StoredAbandoned:
    plan: RoundPlan
    reason: str
    cohort: Facts[Member]
    accepted: Facts[Accepted]
    missing: Facts[str]
    opened_at: float
    closed_at: float
    passed_over: PassedOver = field(default_factory=PassedOver)
    away_s: float = 0.0
    was_revealed: bool = False
    blamed: Facts[str] = field(default_factory=dict[ClientId, str])
    refused: Facts[str] = field(default_factory=dict[ClientId, str])
    opened: tuple[OpenedSum, ...] = ()
    phase: Literal["abandoned"] = "abandoned"


StoredState: TypeAlias = StoredRecruiting | StoredTraining | StoredClosing | StoredCommitted | StoredAbandoned
_STATE: TypeAdapter[StoredState] = TypeAdapter(Annotated[StoredState, Discriminator("phase")])
_WORK: TypeAdapter[Work] = TypeAdapter(Annotated[Work, Field(union_mode="left_to_right")])
_SPOKEN = TypeAdapter(Spoken)


def head_of(state: RoundState) -> str:
    """The state as JSON without its clients."""
    return _STATE.dump_json(_stored(_with_clients(state, _Clients()))).decode()


def state_of(head: str, rows: Iterable["ClientFacts"]) -> RoundState:
    """A state from its head and the rows of its clients."""
    return with_rows(_read(_STATE.validate_json(head)), rows)


def is_committed(head: str) -> bool:
    """Whether the attempt with this head has ended well."""
    return isinstance(_STATE.validate_json(head), StoredCommitted)


def with_head(head: str, known: RoundState) -> RoundState:
    """The state of `head`, with the clients of an earlier state."""
    return _with_clients(_read(_STATE.validate_json(head)), _clients(known))


def _stored(state: RoundState) -> StoredState:
    match state:
        case Recruiting():
            return _copied(StoredRecruiting, state, state.before)
        case Training():
            return _copied(StoredTraining, state, state.secure)
        case Closing():
            return _copied(StoredClosing, state, state.secure)
        case Committed(closing, model_sha256):
            return StoredCommitted(_copied(StoredClosing, closing, closing.secure), model_sha256)
        case Abandoned():
            return _copied(StoredAbandoned, state, state.secure)
        case _:
            assert_never(state)


def _read(stored: StoredState) -> RoundState:
    match stored:
        case StoredRecruiting():
            return _copied(Recruiting, stored, before=_copied(SumsBefore, stored) if stored.opened else None)
        case StoredTraining():
            return _copied(Training, stored, secure=_secure_side(stored))
        case StoredClosing():
            return _read_closing(stored)
        case StoredCommitted(closing, model_sha256):
            return Committed(_read_closing(closing), model_sha256)
        case StoredAbandoned():
            return _copied(Abandoned, stored, secure=_copied(SecureEnd, stored))
        case _:
            assert_never(stored)


def _read_closing(stored: StoredClosing) -> Closing:
    return _copied(Closing, stored, secure=_secure_side(stored))


def _secure_side(stored: StoredTraining | StoredClosing) -> SecureSide | None:
    return _copied(SecureSide, stored) if stored.exchange else None


def _copied(kind: type[Copy], *sources: "DataclassInstance | None", **others: object) -> Copy:
    """A `kind` with the fields that it shares with these sources, and with `others`. Earlier sources win."""
    found: dict[str, Any] = {}
    for source in reversed(sources):
        if source is not None:
            found |= {one.name: getattr(source, one.name) for one in fields(source)}
    return kind(**{one.name: found[one.name] for one in fields(kind) if one.name in found}, **others)


# --- the rows of clients ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """One client's part of a round's state."""

    client: ClientId
    member: Member
    accepted: Accepted | None = None
    declined: str | None = None
    missing: str | None = None
    spoken: Spoken | None = None


def spoken_of(text: str | None) -> Spoken | None:
    """A client's messages of a secure round, from their column."""
    return None if text is None else _SPOKEN.validate_json(text)


def accepted_of(weight: int | None, work: str | None) -> Accepted | None:
    """An accepted report, from its two columns."""
    return None if weight is None or work is None else Accepted(weight, _WORK.validate_json(work))


def with_rows(state: RoundState, rows: Iterable[ClientFacts]) -> RoundState:
    """A state after these clients' rows were changed or added."""
    before = _clients(state)
    cohort, accepted = dict(before.cohort), dict(before.accepted)
    declined, missing, spoken = dict(before.declined or {}), dict(before.missing or {}), dict(before.spoken or {})
    for row in rows:
        _put(cohort, row.client, row.member)
        _put(accepted, row.client, row.accepted)
        _put(declined, row.client, row.declined)
        _put(missing, row.client, row.missing)
        _put(spoken, row.client, row.spoken)
    return _with_clients(state, _Clients(cohort, accepted, declined, missing, spoken))


def changed_columns(before: RoundState, after: RoundState) -> dict[ClientId, dict[str, object]]:
    """The columns of `AssignmentRow` to write for each client that differs between two states of one round.

    A column keeps its value if the new state has no map for it.
    """
    old, new = _clients(before), _clients(after)
    changed = _differing(old.cohort, new.cohort) | _differing(old.accepted, new.accepted)
    changed |= _differing(old.declined, new.declined) | _differing(old.missing, new.missing)
    changed |= _differing(old.spoken, new.spoken)
    return {client: _columns(new, client) for client in sorted(changed)}


@dataclass(frozen=True, slots=True)
class _Clients:
    """The maps of clients in a state; None for a map that this kind of state does not have."""

    cohort: Facts[Member] = field(default_factory=dict[ClientId, Member])
    accepted: Facts[Accepted] = field(default_factory=dict[ClientId, Accepted])
    declined: Facts[str] | None = None
    missing: Facts[str] | None = None
    spoken: Facts[Spoken] | None = None


def _clients(state: RoundState) -> _Clients:
    match state:
        case Recruiting():
            return _Clients()
        case Training(exchange=exchange):
            spoken = exchange.spoken if exchange else None
            return _Clients(state.cohort, state.accepted, state.declined, None, spoken)
        case Closing(exchange=exchange):
            spoken = exchange.spoken if exchange else None
            return _Clients(state.cohort, state.accepted, None, state.missing, spoken)
        case Committed(closing):
            return _clients(closing)
        case Abandoned():
            return _Clients(state.cohort, state.accepted, None, state.missing)
        case _:
            assert_never(state)


def _with_clients(state: RoundState, clients: _Clients) -> RoundState:
    cohort, accepted = clients.cohort, clients.accepted
    match state:
        case Recruiting():
            return state
        case Training():
            secure = _with_spoken(state.secure, clients)
            declined = clients.declined or {}
            return replace(state, cohort=cohort, accepted=accepted, declined=declined, secure=secure)
        case Closing():
            return _closing_with_clients(state, clients)
        case Committed():
            return replace(state, closing=_closing_with_clients(state.closing, clients))
        case Abandoned():
            return replace(state, cohort=cohort, accepted=accepted, missing=clients.missing or {})
        case _:
            assert_never(state)


def _closing_with_clients(state: Closing, clients: _Clients) -> Closing:
    return replace(
        state,
        cohort=clients.cohort,
        accepted=clients.accepted,
        missing=clients.missing or {},
        secure=_with_spoken(state.secure, clients),
    )


def _with_spoken(secure: SecureSide | None, clients: _Clients) -> SecureSide | None:
    return secure and secure.after(replace(secure.exchange, spoken=clients.spoken or {}))


def _put(facts: dict[ClientId, Fact], client: ClientId, fact: Fact | None) -> None:
    if fact is None:
        facts.pop(client, None)
    else:
        facts[client] = fact


def _differing(old: Facts[Fact] | None, new: Facts[Fact] | None) -> set[ClientId]:
    """The clients whose values differ."""
    if new is None or old is new:
        return set()
    old = old or {}
    return {client for client, fact in new.items() if old.get(client) is not fact} | (old.keys() - new.keys())


def _columns(state: _Clients, client: ClientId) -> dict[str, object]:
    member, accepted = state.cohort[client], state.accepted.get(client)
    columns: dict[str, object] = {
        "draws": member.draws,
        "sample_count": member.sample_count,
        "tier": member.tier,
        "weight": accepted.weight if accepted else None,
        "work": _WORK.dump_json(accepted.work).decode() if accepted else None,
    }
    if state.spoken is not None:
        said = state.spoken.get(client)
        columns["spoken"] = None if said is None else _SPOKEN.dump_json(said).decode()
    if state.declined is not None:
        columns["declined"] = state.declined.get(client)
    if state.missing is not None:
        columns["missing"] = state.missing.get(client)
    return columns
