"""A round's state as it is stored: a small head, and one row for each client of the cohort. Pure.

A report changes one client's row and the head, so that what is written does not grow with the cohort.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from pydantic import Discriminator, Field, TypeAdapter

from umbel.aggregation.reports import Work
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.states import Accepted, Committed, RoundState
from umbel.aggregation.secagg.turns import Spoken
from umbel.aggregation.types import ClientId

_STATE: TypeAdapter[RoundState] = TypeAdapter(Annotated[RoundState, Discriminator("phase")])
_WORK: TypeAdapter[Work] = TypeAdapter(Annotated[Work, Field(union_mode="left_to_right")])
_SPOKEN = TypeAdapter(Spoken)
_MAPS = ("cohort", "accepted", "declined", "missing")


@dataclass(frozen=True, slots=True)
class ClientRow:
    """What is stored of one client in one round's state."""

    client: ClientId
    member: Member
    accepted: Accepted | None = None
    declined: str | None = None
    missing: str | None = None
    spoken: Spoken | None = None


def spoken_of(text: str | None) -> Spoken | None:
    """What a client has said in a secure round, in one column."""
    return None if text is None else _SPOKEN.validate_json(text)


def accepted_of(weight: int | None, work: str | None) -> Accepted | None:
    """The accepted report in two columns, if there is one."""
    return None if weight is None or work is None else Accepted(weight, _WORK.validate_json(work))


def head_of(state: RoundState) -> str:
    """The state as JSON without its maps of clients."""
    return _STATE.dump_json(_with_maps(state, {})).decode()


def state_of(head: str, rows: Iterable[ClientRow]) -> RoundState:
    """The whole state, from its head and the rows of its clients."""
    return with_rows(_STATE.validate_json(head), rows)


def with_rows(state: RoundState, rows: Iterable[ClientRow]) -> RoundState:
    """The state after these clients' rows have changed, or come to it."""
    maps: dict[str, dict[ClientId, Any]] = {name: dict(_map(_inner(state), name)) for name in (*_MAPS, "spoken")}
    for row in rows:
        facts = (row.member, row.accepted, row.declined, row.missing, row.spoken)
        for name, fact in zip(maps, facts, strict=True):
            if fact is None:
                maps[name].pop(row.client, None)
            else:
                maps[name][row.client] = fact
    return _with_maps(state, maps)


def with_head(head: str, known: RoundState) -> RoundState:
    """The state that `head` tells of, with the clients of an earlier one."""
    inner = _inner(known)
    return _with_maps(_STATE.validate_json(head), {name: _map(inner, name) for name in (*_MAPS, "spoken")})


def changed_columns(before: RoundState, after: RoundState) -> dict[ClientId, dict[str, object]]:
    """The columns of `tables.Assignment` to write, for each client in which two states of one round differ.

    A column whose map the new state does not have stays as it was.
    """
    old, new = _inner(before), _inner(after)
    changed: set[ClientId] = set()
    for name in (*_MAPS, "spoken"):
        had = _map(old, name)
        has = _map(new, name) if _has_map(new, name) else None
        if has is not None and had is not has:
            changed |= {client for client, fact in has.items() if had.get(client) is not fact}
            changed |= had.keys() - has.keys()
    return {client: _columns(new, client) for client in sorted(changed)}


def _columns(state: Any, client: ClientId) -> dict[str, object]:
    member: Member = state.cohort[client]
    accepted: Accepted | None = state.accepted.get(client)
    columns: dict[str, object] = {
        "draws": member.draws,
        "sample_count": member.sample_count,
        "tier": member.tier,
        "weight": accepted.weight if accepted else None,
        "work": _WORK.dump_json(accepted.work).decode() if accepted else None,
    }
    if _has_map(state, "spoken"):
        said = _map(state, "spoken").get(client)
        columns["spoken"] = None if said is None else _SPOKEN.dump_json(said).decode()
    return columns | {name: getattr(state, name).get(client) for name in _MAPS[2:] if hasattr(state, name)}


def _has_map(inner: Any, name: str) -> bool:
    return hasattr(inner, name) if name in _MAPS else getattr(inner, "exchange", None) is not None


def _map(inner: Any, name: str) -> Mapping[ClientId, Any]:
    """One of a state's maps of clients; what they have said in a secure round stands in its exchange."""
    if not _has_map(inner, name):
        return {}
    found: Mapping[ClientId, Any] = getattr(inner if name in _MAPS else inner.exchange, name)
    return found


def _inner(state: RoundState) -> Any:
    """The state that knows the cohort."""
    return state.closing if isinstance(state, Committed) else state


def _with_maps(state: RoundState, maps: Mapping[str, Any]) -> RoundState:
    inner = _inner(state)
    own = {field.name for field in fields(inner)} & set(_MAPS)
    filled = replace(inner, **{name: maps.get(name, {}) for name in own})
    if _has_map(filled, "spoken"):
        filled = replace(filled, exchange=replace(filled.exchange, spoken=maps.get("spoken", {})))
    return replace(state, closing=filled) if isinstance(state, Committed) else filled
