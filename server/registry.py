"""Who may speak: every query on clients and enrolment tokens, in named short transactions (nonces: `admission.py`).

Any number of replicas share the database. A client's key never changes, so it is remembered; that its client was
revoked at another replica is seen by `refresh`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.errors import SignatureRefused
from umbel.aggregation.messages import Enrolment
from umbel.aggregation.signatures import Claims
from umbel.server import journal, tables
from umbel.server.admission import Admission, Signed, replayed
from umbel.server.batches import Batches
from umbel.server.database import Database
from umbel.server.problems import Refused
from umbel.server.tables import table_of
from umbel.server.waiter_store import WaiterStore

_CLIENT, _TOKEN = table_of(tables.Client), table_of(tables.Token)
_KNOWN_MAX = 100_000
_LOOK_BACK_S = 600.0
"""Replicas' clocks differ, and a revocation is dated before its transaction ends: `refresh` looks that far back."""
TIER_LABEL = "tier"


@dataclass(frozen=True, slots=True)
class KnownClient:
    """A client that may speak. `tier`: its label of that name, or the empty string."""

    id: str
    public_key: bytes
    tier: str


@dataclass(frozen=True, slots=True)
class ClientView:
    """A client as the operator sees it. Times in Unix seconds."""

    id: str
    labels: dict[str, str]
    enrolled_at: float
    last_heard_at: float
    revoked_at: float | None


@dataclass(frozen=True, slots=True)
class _Enrolling:
    """A verified enrolment. `claims`: of the request that it came in."""

    enrolment: Enrolment
    claims: Claims
    now: float


class Registry:
    """Clients and tokens."""

    def __init__(self, database: Database, waiters: WaiterStore) -> None:
        self._db = database
        self._admission = Admission(database, waiters)
        self._known: dict[str, KnownClient] = {}
        self._revoked: set[str] = set()  # as far as is known: for requests that were under way when it happened
        self._looked_at: float | None = None
        self._lookups: Batches[str, KnownClient | None] = Batches(self._look_up)
        self._enrolments: Batches[_Enrolling, None] = Batches(self._enrol)

    async def close(self) -> None:
        """Store what is not stored yet."""
        await self._admission.store_heard()

    async def client(self, name: str) -> KnownClient | None:
        """An enrolled client; a revoked one is unknown."""
        if (known := self._known.get(name)) is not None:
            return known
        return await self._lookups.do(name)

    async def _look_up(self, names: Sequence[str]) -> Sequence[KnownClient | None]:
        clients = tables.Client
        columns = select(clients.id, clients.public_key, clients.labels)
        async with self._db.reading() as tx:
            rows = (await tx.execute(columns.where(clients.id.in_(names), clients.revoked_at.is_(None)))).all()
        found = {row.id: KnownClient(row.id, row.public_key, _tier(row.labels)) for row in rows}
        if len(self._known) + len(found) > _KNOWN_MAX:
            self._known.clear()
        self._known.update((name, known) for name, known in found.items() if name not in self._revoked)
        return [self._known.get(name) for name in names]

    async def admit(self, signed: Signed) -> None:
        """Remember the nonce of a request for as long as its signature passes.

        Returns when that is stored. Raises `ReplayedNonce`, or `Refused` if the client was revoked meanwhile.
        """
        await self._admission.admit(signed)
        self.refuse_revoked(signed.claims.key_id)

    async def forget_nonces(self, now: float) -> None:
        """To be called every minute or so: drop the nonces that no signature can carry any more."""
        await self._admission.forget_nonces(now)
        await self._admission.store_heard()

    async def refresh(self, now: float) -> tuple[str, ...]:
        """The clients that were revoked at other replicas since the last look. To be called twice a second or so."""
        clients, since = tables.Client, min(now, self._looked_at or now) - _LOOK_BACK_S
        async with self._db.reading() as tx:
            found = await tx.scalars(select(clients.id).where(clients.revoked_at > since))
            news = tuple(name for name in found if name not in self._revoked)
        self._looked_at = now
        for name in news:
            self._forget(name)
        return news

    def _forget(self, name: str) -> None:
        self._revoked.add(name)
        self._known.pop(name, None)

    def refuse_revoked(self, name: str) -> None:
        """Raise `Refused` if this client was revoked while its request, which had passed `client`, was under way."""
        if name in self._revoked:
            raise Refused("unknown-client", "the coordinator's operator has removed this client")

    async def clients(self) -> tuple[ClientView, ...]:
        async with self._db.reading() as tx:
            rows = (await tx.execute(select(_CLIENT).order_by(_CLIENT.c.id))).all()
        return tuple(
            ClientView(
                row.id,
                json.loads(row.labels),
                row.enrolled_at,
                max(row.last_heard_at, self._admission.heard_at(row.id)),
                row.revoked_at,
            )
            for row in rows
        )

    async def add_tokens(self, tokens: Sequence[str], now: float, ttl_s: float) -> None:
        rows = [{"sha256": _hash(token), "created_at": now, "expires_at": now + ttl_s} for token in tokens]
        async with self._db.writing("add_tokens") as tx:
            await tx.execute(insert(tables.Token), rows)
        journal.tokens_made(len(tokens), ttl_s)

    async def enrol(self, enrolment: Enrolment, claims: Claims, now: float) -> None:
        """Use a token for a new client; the same enrolment again is the same. Raises `Refused`, `ReplayedNonce`."""
        await self._enrolments.do(_Enrolling(enrolment, claims, now))

    async def _enrol(self, batch: Sequence[_Enrolling]) -> Sequence[Refused | SignatureRefused | None]:
        """Enrol a batch in one transaction. Raises `IntegrityError` where two of it, or of two replicas, collide."""
        try:
            async with self._db.writing("enrol") as tx:
                refusals = await _judge(tx, batch)
                passed = [one for one, refusal in zip(batch, refusals, strict=True) if refusal is None]
                new = await _new_of(tx, passed)
                await self._admission.remember(tx, [one.claims for one in passed])
                await _add(tx, new)
        except IntegrityError:
            if len(batch) > 1:
                raise
            return [await self._why_collided(batch[0])]
        for one in new:
            journal.enrolled(one.enrolment.client, one.enrolment.labels)
        return refusals

    async def _why_collided(self, one: _Enrolling) -> Refused | SignatureRefused:
        """Another replica has just taken the name or the token, or this very request came before."""
        async with self._db.reading() as tx:
            [refusal] = await _judge(tx, [one])
        return refusal or replayed()

    async def revoke(self, name: str, now: float) -> bool:
        """Take a client's right to speak; False if there is no such client."""
        async with self._db.writing("revoke") as tx:
            mine = _CLIENT.c.id == name
            row = (await tx.execute(select(_CLIENT.c.revoked_at).where(mine).with_for_update())).one_or_none()
            if row is None:
                return False
            is_new = row.revoked_at is None
            if is_new:
                await tx.execute(update(_CLIENT).where(mine).values(revoked_at=now))
        self._forget(name)
        if is_new:
            journal.revoked(name)
        return True


async def _judge(tx: AsyncConnection, batch: Sequence[_Enrolling]) -> Sequence[Refused | None]:
    """What each enrolment is refused for, if it is. Other replicas wait with the same tokens until `tx` ends."""
    hashes = [_hash(one.enrolment.token) for one in batch]
    chosen = select(_TOKEN).where(_TOKEN.c.sha256.in_(hashes)).order_by(_TOKEN.c.sha256)
    tokens = {token.sha256: token for token in await tx.execute(chosen.with_for_update())}
    clients = await _clients(tx, batch)
    return [
        _refusal(one, tokens.get(token), clients.get(one.enrolment.client))
        for one, token in zip(batch, hashes, strict=True)
    ]


def _refusal(one: _Enrolling, token: Row[Any] | None, client: Row[Any] | None) -> Refused | None:
    """Refuse an enrolment unless its token is good for this name, and the name for this key."""
    enrolment = one.enrolment
    if token is None:
        return Refused("unknown-token", "this token was never issued here; ask the coordinator's operator for one")
    key_matches = client is not None and bool(client.public_key == enrolment.public_key_bytes)
    if token.used_by is not None and not (token.used_by == enrolment.client and key_matches):
        return Refused("token-used", "this token enrolled another client; ask the coordinator's operator for a new one")
    if client is not None and (not key_matches or client.revoked_at is not None):
        return Refused("name-taken", f"a client named {enrolment.client!r} exists with another key; take another name")
    if token.used_by is None and token.expires_at <= one.now:
        return Refused("expired-token", "this token has expired; ask the coordinator's operator for a new one")
    return None


async def _clients(tx: AsyncConnection, batch: Sequence[_Enrolling]) -> Mapping[str, Row[Any]]:
    names = [one.enrolment.client for one in batch]
    return {row.id: row for row in await tx.execute(select(_CLIENT).where(_CLIENT.c.id.in_(names)))}


async def _new_of(tx: AsyncConnection, passed: Sequence[_Enrolling]) -> Sequence[_Enrolling]:
    """Those that are no repeats."""
    known = await _clients(tx, passed)
    return [one for one in passed if one.enrolment.client not in known]


async def _add(tx: AsyncConnection, new: Sequence[_Enrolling]) -> None:
    """Store the new clients. A token that two of them bring is used by one: the other fails."""
    if new:
        await tx.execute(insert(tables.Client), [_client_row(one) for one in new])
    for one in new:
        mine = update(tables.Token).where(tables.Token.sha256 == _hash(one.enrolment.token))
        used = await tx.execute(mine.where(tables.Token.used_by.is_(None)).values(used_by=one.enrolment.client))
        if used.rowcount != 1:
            raise IntegrityError("a token brought twice", None, ValueError())


def _client_row(one: _Enrolling) -> dict[str, object]:
    enrolment = one.enrolment
    return {
        "id": enrolment.client,
        "public_key": enrolment.public_key_bytes,
        "labels": json.dumps(dict(enrolment.labels), sort_keys=True),
        "enrolled_at": one.now,
        "last_heard_at": one.now,
    }


def _tier(labels: str) -> str:
    return str(json.loads(labels).get(TIER_LABEL, ""))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
