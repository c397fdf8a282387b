"""How clients come in: one-time tokens, what each binds, and which enrolment is refused, and why.

A token may bind a name, labels, or both. Bound is the operator's word, and only that counts where a run relies on who
a client is (`coverage.sites`, tiers); what a client says of itself beside it is shown, and counts for nothing. A name
that is promised, to whoever holds an unused token for it or to a run that counts on it, is enrolled by no other token.
A key is one client: under a second name it would be drawn twice, into a cohort that no site takes part in.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.errors import SignatureRefused
from umbel.aggregation.messages import Enrolment
from umbel.aggregation.trust.signatures import Claims
from umbel.server import journal
from umbel.server.devices.admission import Admission, replayed
from umbel.server.problems import Refused, client_removed
from umbel.server.store import tables
from umbel.server.store.batches import Batches
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

_CLIENT, _TOKEN = table_of(tables.ClientRow), table_of(tables.TokenRow)
_KEPT_S = 7 * 86400.0
"""So long after its end a token is known as used or expired; then it is one that was never issued."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a token says of the client that it enrols. `client`: its name; None: the client chooses one."""

    client: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def words(self) -> str:
        """For the log; empty if it binds nothing."""
        name = [f"name {self.client}"] if self.client is not None else []
        return ", ".join([*name, *(f"{label}={value}" for label, value in sorted(self.labels.items()))])


@dataclass(frozen=True, slots=True)
class Enrolling:
    """A verified enrolment. `claims`: of the request that it came in; `is_counted_on`: a run's coverage names it."""

    enrolment: Enrolment
    claims: Claims
    now: float
    is_counted_on: bool

    @property
    def name(self) -> str:
        return self.enrolment.client

    @property
    def token_sha256(self) -> str:
        return _hash(self.enrolment.token)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is stored of a batch. `tokens`: by hash; `clients`: by name; `promised`: names that unused tokens bind;
    `name_of`: who has a key and may speak.
    """

    tokens: Mapping[str, Row[Any]]
    clients: Mapping[str, Row[Any]]
    promised: Collection[str]
    name_of: Mapping[bytes, str]


class Enrolments:
    """Tokens, and the clients that they let in."""

    def __init__(self, database: Database, admission: Admission) -> None:
        self._db = database
        self._admission = admission
        self._batches: Batches[Enrolling, None] = Batches(self._enrol)

    async def add_tokens(self, tokens: Sequence[str], now: float, ttl_s: float, binding: Binding) -> None:
        """Store new tokens. Raises `Refused` if the name that they bind is taken."""
        token = {
            "created_at": now,
            "expires_at": now + ttl_s,
            "client": binding.client,
            "labels": _json(binding.labels),
        }
        async with self._db.writing("add_tokens") as tx:
            if binding.client is not None and await _clients(tx, [binding.client]):
                detail = f"a client named {binding.client!r} has enrolled already, or was removed; take another name"
                raise Refused("name-taken", detail)
            await tx.execute(insert(_TOKEN), [{"sha256": _hash(one), **token} for one in tokens])
        journal.tokens_made(len(tokens), ttl_s, binding.words)

    async def sweep(self, now: float) -> None:
        """Drop the tokens, used or not, that expired a week ago: the database would keep them for ever."""
        async with self._db.writing("sweep_tokens") as tx:
            await tx.execute(delete(_TOKEN).where(_TOKEN.c.expires_at <= now - _KEPT_S))

    async def enrol(self, enrolling: Enrolling) -> None:
        """Use a token for a new client; the same client again is the same. Raises `Refused`, `ReplayedNonce`."""
        await self._batches.do(enrolling)

    async def _enrol(self, batch: Sequence[Enrolling]) -> Sequence[Refused | SignatureRefused | None]:
        """Enrol a batch in one transaction. Raises `IntegrityError` where two of it, or of two replicas, collide in
        name, token or key.
        """
        try:
            async with self._db.writing("enrol") as tx:
                facts = await _facts(tx, batch)
                refusals = [_refusal(one, facts) for one in batch]
                passed = [one for one, refusal in zip(batch, refusals, strict=True) if refusal is None]
                new = [one for one in passed if one.name not in facts.clients]
                await self._admission.remember(tx, [one.claims for one in passed])
                await _add(tx, new, facts)
        except IntegrityError:
            if len(batch) > 1:
                raise
            return [await self._why_collided(batch[0])]
        for one in new:
            binding = _binding(facts.tokens[one.token_sha256])
            journal.enrolled(one.name, {**one.enrolment.labels, **binding.labels}, binding.words)
        return refusals

    async def _why_collided(self, one: Enrolling) -> Refused | SignatureRefused:
        """Another replica has just taken the name, the token or the key, or this very request came before."""
        async with self._db.reading() as tx:
            return _refusal(one, await _facts(tx, [one])) or replayed()


def _refusal(one: Enrolling, facts: _Facts) -> Refused | None:
    """Refuse an enrolment unless its token is good for this name and these labels, the name for this key, and the key
    for this name.

    Whoever has a client's key is that client, whatever token it brings: an enrolment may be repeated for ever.
    """
    client, token = facts.clients.get(one.name), facts.tokens.get(one.token_sha256)
    if client is not None and client.public_key == one.enrolment.public_key_bytes:
        return client_removed() if client.revoked_at is not None else None
    if token is None:
        return Refused("unknown-token", "this token was never issued here; ask the coordinator's operator for one")
    if token.used_by is not None:
        return Refused("token-used", "this token enrolled another client; ask the coordinator's operator for a new one")
    if token.expires_at <= one.now:
        return Refused("expired-token", "this token has expired; ask the coordinator's operator for a new one")
    if (why := _mismatch(one.enrolment, token)) is not None:
        return Refused("token-mismatch", why)
    if client is not None:
        return Refused("name-taken", f"a client named {one.name!r} exists with another key; take another name")
    if token.client is None and (one.is_counted_on or one.name in facts.promised):
        detail = f"the name {one.name!r} is kept; take another, or ask the operator for the token that was made for it"
        return Refused("name-taken", detail)
    if (other := facts.name_of.get(one.enrolment.public_key_bytes)) is not None:
        return Refused("key-taken", _key_is_of(other))
    return None


def _key_is_of(other: str) -> str:
    """Only to whoever has signed with the key: strangers cannot find out who takes part."""
    return (
        f"this key is enrolled already, as {other!r}, and a key is one client: go on under that name, or enrol with a "
        "key of its own, as another state directory (--state) makes one, or have the operator remove that name first "
        f"(umbel client remove {other})"
    )


def _mismatch(enrolment: Enrolment, token: Row[Any]) -> str | None:
    """What an enrolment says against its token. Labels that the token binds may be left out."""
    if token.client not in (None, enrolment.client):
        return (
            f"this token is for {token.client!r}, and this client enrols as {enrolment.client!r}. If you are "
            f"{token.client!r}, use that name; if you are {enrolment.client!r}, ask the operator for a token for "
            f"{enrolment.client!r}"
        )
    for name, value in _binding(token).labels.items():
        if (said := enrolment.labels.get(name, value)) != value:
            return f"this token says {name}={value}, the client {name}={said}; leave that label out, or correct it"
    return None


async def _facts(tx: AsyncConnection, batch: Sequence[Enrolling]) -> _Facts:
    """Read what decides. Other replicas wait with the same tokens until `tx` ends."""
    names, now = [one.name for one in batch], min(one.now for one in batch)
    chosen = select(_TOKEN).where(_TOKEN.c.sha256.in_([one.token_sha256 for one in batch])).order_by(_TOKEN.c.sha256)
    tokens = {token.sha256: token for token in await tx.execute(chosen.with_for_update())}
    is_out = _TOKEN.c.client.in_(names) & _TOKEN.c.used_by.is_(None) & (_TOKEN.c.expires_at > now)
    promised = frozenset(await tx.scalars(select(_TOKEN.c.client).where(is_out)))
    keys = [one.enrolment.public_key_bytes for one in batch]
    holders = select(_CLIENT.c.public_key, _CLIENT.c.id).where(
        _CLIENT.c.public_key.in_(keys), _CLIENT.c.revoked_at.is_(None)
    )
    name_of = {row.public_key: row.id for row in await tx.execute(holders)}
    return _Facts(tokens, await _clients(tx, names), promised, name_of)


async def _clients(tx: AsyncConnection, names: Sequence[str]) -> Mapping[str, Row[Any]]:
    return {row.id: row for row in await tx.execute(select(_CLIENT).where(_CLIENT.c.id.in_(names)))}


async def _add(tx: AsyncConnection, new: Sequence[Enrolling], facts: _Facts) -> None:
    """Store the new clients. A token that two of them bring is used by one: the other fails."""
    if new:
        await tx.execute(insert(_CLIENT), [_client_row(one, facts.tokens[one.token_sha256]) for one in new])
    for one in new:
        mine = update(_TOKEN).where(_TOKEN.c.sha256 == one.token_sha256, _TOKEN.c.used_by.is_(None))
        used = await tx.execute(mine.values(used_by=one.name))
        if used.rowcount != 1:
            raise IntegrityError("a token brought twice", None, ValueError())


def _client_row(one: Enrolling, token: Row[Any]) -> dict[str, object]:
    binding = _binding(token)
    return {
        "id": one.name,
        "public_key": one.enrolment.public_key_bytes,
        "labels": _json({**one.enrolment.labels, **binding.labels}),
        "bound_labels": _json(binding.labels),
        "is_name_bound": binding.client is not None,
        "enrolled_at": one.now,
        "last_heard_at": one.now,
    }


def _binding(token: Row[Any]) -> Binding:
    return Binding(token.client, json.loads(token.labels))


def _json(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(labels), sort_keys=True)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
