"""Enrolment of clients: one-time tokens, what each binds, and which enrolments are refused.

A token may bind a name, labels, or both. Only bound names and labels count where a run relies on a client's identity
(`coverage.sites`, tiers), because the operator vouches for them. A client's own labels are only shown. A name that an
unused token binds, or that a run's coverage lists, can be enrolled with no other token. A key belongs to one client:
under a second name it would be drawn twice, and sites decline such a cohort.
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
"""Tokens are kept this long after they expire; then they count as never issued."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a token binds. `client`: the name; None: the client chooses one."""

    client: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def words(self) -> str:
        """In words, for the log; empty if it binds nothing."""
        name = [f"name {self.client}"] if self.client is not None else []
        return ", ".join([*name, *(f"{label}={value}" for label, value in sorted(self.labels.items()))])


@dataclass(frozen=True, slots=True)
class Enrolling:
    """A verified enrolment. `claims`: of its request; `is_counted_on`: a run's coverage names this client."""

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
    """What is stored about a batch. `tokens`: by hash; `clients`: by name; `promised`: names that unused tokens bind;
    `name_of`: the client that has a key and is not revoked.
    """

    tokens: Mapping[str, Row[Any]]
    clients: Mapping[str, Row[Any]]
    promised: Collection[str]
    name_of: Mapping[bytes, str]


class Enrolments:
    """Makes tokens, and enrols clients with them."""

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
                detail = f"the name {binding.client!r} is that of an enrolled or removed client; choose another name"
                raise Refused("name-taken", detail)
            await tx.execute(insert(_TOKEN), [{"sha256": _hash(one), **token} for one in tokens])
        journal.tokens_made(len(tokens), ttl_s, binding.words)

    async def sweep(self, now: float) -> None:
        """Drop the tokens, used or not, that expired a week ago."""
        async with self._db.writing("sweep_tokens") as tx:
            await tx.execute(delete(_TOKEN).where(_TOKEN.c.expires_at <= now - _KEPT_S))

    async def enrol(self, enrolling: Enrolling) -> None:
        """Enrol a client with a token. A repetition changes nothing. Raises `Refused` and `ReplayedNonce`."""
        await self._batches.do(enrolling)

    async def _enrol(self, batch: Sequence[Enrolling]) -> Sequence[Refused | SignatureRefused | None]:
        """Enrol a batch in one transaction. Raises `IntegrityError` if two enrolments share a name, token or key."""
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
        """The refusal after a collision: another replica took the name, token or key, or the request is a replay."""
        async with self._db.reading() as tx:
            return _refusal(one, await _facts(tx, [one])) or replayed()


def _refusal(one: Enrolling, facts: _Facts) -> Refused | None:
    """Why an enrolment is refused; None if its token, name, labels and key fit together.

    The key of an enrolled client is enough, with any token, so that an enrolment can always be repeated.
    """
    client, token = facts.clients.get(one.name), facts.tokens.get(one.token_sha256)
    if client is not None and client.public_key == one.enrolment.public_key_bytes:
        return client_removed() if client.revoked_at is not None else None
    if token is None:
        return Refused(
            "unknown-token", "this coordinator does not know this token; check it, or ask the operator for a new one"
        )
    if token.used_by is not None:
        return Refused(
            "token-used", "another client has already used this token; ask the coordinator's operator for a new one"
        )
    if token.expires_at <= one.now:
        return Refused("expired-token", "this token has expired; ask the coordinator's operator for a new one")
    if (why := _mismatch(one.enrolment, token)) is not None:
        return Refused("token-mismatch", why)
    if client is not None:
        return Refused(
            "name-taken", f"a client named {one.name!r} is already enrolled with another key; choose another name"
        )
    if token.client is None and (one.is_counted_on or one.name in facts.promised):
        detail = (
            f"the name {one.name!r} is reserved; choose another name, or ask the operator for a token for {one.name!r}"
        )
        return Refused("name-taken", detail)
    if (other := facts.name_of.get(one.enrolment.public_key_bytes)) is not None:
        return Refused("key-taken", _key_is_of(other))
    return None


def _key_is_of(other: str) -> str:
    """For a client that has signed with the key: others must not learn which clients are enrolled."""
    return (
        f"this key is already enrolled as {other!r}, and each client needs a key of its own. Use the name {other!r}; "
        "or use another state directory (--state), which makes a new key; or ask the operator to remove that client "
        f"first (umbel client remove {other})"
    )


def _mismatch(enrolment: Enrolment, token: Row[Any]) -> str | None:
    """How an enrolment contradicts its token, or None. It may leave out labels that the token binds."""
    if token.client not in (None, enrolment.client):
        return (
            f"this token is for {token.client!r}, and this client enrols as {enrolment.client!r}. If you are "
            f"{token.client!r}, use that name; if you are {enrolment.client!r}, ask the operator for a token for "
            f"{enrolment.client!r}"
        )
    for name, value in _binding(token).labels.items():
        if (said := enrolment.labels.get(name, value)) != value:
            return (
                f"this token sets the label {name}={value}, but the enrolment says {name}={said}; leave this label out "
                "of the enrolment"
            )
    return None


async def _facts(tx: AsyncConnection, batch: Sequence[Enrolling]) -> _Facts:
    """Read what is stored about a batch, and lock its tokens until `tx` ends."""
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
    """Store the new clients. Raises `IntegrityError` if two of them bring the same token."""
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
