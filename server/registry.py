"""Who may speak: every query on clients, enrolment tokens and nonces, in named short transactions."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from umbel.aggregation.errors import ReplayedNonce
from umbel.aggregation.messages import Enrolment
from umbel.aggregation.signatures import CLOCK_SKEW_S, Claims
from umbel.server import journal, tables
from umbel.server.database import Database
from umbel.server.problems import Refused

_KNOWN_MAX = 100_000
_LOOK_BACK_S = 600.0  # revocations are looked for so far back, however the replicas' clocks differ


@dataclass(frozen=True, slots=True)
class KnownClient:
    """A client that may speak. `tier`: its label of that name, or empty."""

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
class _Seen:
    """A verified request whose nonce is about to be stored."""

    claims: Claims
    at: float
    stored: asyncio.Future[None]


class Registry:
    """Clients, tokens and nonces."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._known: dict[str, KnownClient] = {}  # `refresh` drops those that other replicas revoke
        self._looked_at: float | None = None
        self._revoked: set[str] = set()  # since the start: for requests that were under way when it happened
        self._seen: list[_Seen] = []
        self._writing: asyncio.Task[None] | None = None

    async def client(self, name: str) -> KnownClient | None:
        """An enrolled client; a revoked one is unknown."""
        if (known := self._known.get(name)) is not None:
            return known
        async with self._db.reading() as tx:
            row = await tx.get(tables.Client, name)
        if row is None or row.revoked_at is not None or name in self._revoked:
            return None
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        return self._known.setdefault(name, KnownClient(row.id, row.public_key, json.loads(row.labels).get("tier", "")))

    async def refresh(self, now: float) -> tuple[str, ...]:
        """The clients that were revoked at other replicas since the last look."""
        since = min(now, now if self._looked_at is None else self._looked_at) - _LOOK_BACK_S
        recently = select(tables.Client.id).where(tables.Client.revoked_at > since)
        async with self._db.reading() as tx:
            names = set((await tx.scalars(recently)).all()) - self._revoked
        self._looked_at = now
        self._revoked |= names
        for name in names:
            self._known.pop(name, None)
        return tuple(sorted(names))

    def refuse_revoked(self, name: str) -> None:
        """Raise `Refused` if this client was revoked while its request, which had passed `client`, was under way."""
        if name in self._revoked:
            raise Refused("unknown-client", "the coordinator's operator has removed this client")

    async def clients(self) -> tuple[ClientView, ...]:
        async with self._db.reading() as tx:
            rows = (await tx.scalars(select(tables.Client).order_by(tables.Client.id))).all()
        return tuple(
            ClientView(row.id, json.loads(row.labels), row.enrolled_at, row.last_heard_at, row.revoked_at)
            for row in rows
        )

    async def remember(self, claims: Claims, now: float) -> None:
        """Note a verified request's nonce for as long as its signature would pass.

        Returns when it is stored. Requests that come while one transaction is being written share the next. Raises
        `ReplayedNonce`, or `Refused` if the client was revoked meanwhile.
        """
        seen = _Seen(claims, now, asyncio.get_running_loop().create_future())
        self._seen.append(seen)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_seen())
        await seen.stored
        self.refuse_revoked(claims.key_id)

    async def _write_seen(self) -> None:
        try:
            while self._seen:
                batch, self._seen = self._seen, []
                await self._write_batch(batch)
        finally:
            self._writing = None

    async def _write_batch(self, batch: list["_Seen"]) -> None:
        """One transaction for all; if it fails, one for each, so that only the guilty is refused."""
        try:
            async with self._db.writing("remember_nonces") as tx:
                await tx.execute(insert(tables.Nonce), _nonce_rows(batch))
                await tx.execute(update(tables.Client), _heard_rows(batch))
        except Exception as error:
            if len(batch) > 1:
                for seen in batch:
                    await self._write_batch([seen])
            elif not batch[0].stored.done():
                batch[0].stored.set_exception(_replayed() if isinstance(error, IntegrityError) else error)
            return
        for seen in batch:
            if not seen.stored.done():  # a request that was cancelled waits no more
                seen.stored.set_result(None)

    async def forget_nonces(self, now: float) -> None:
        """Drop the nonces that no signature can carry any more."""
        async with self._db.writing("forget_nonces") as tx:
            await tx.execute(delete(tables.Nonce).where(tables.Nonce.expires_at < now))

    async def add_tokens(self, tokens: Sequence[str], now: float, ttl_s: float) -> None:
        rows = [{"sha256": _hash(token), "created_at": now, "expires_at": now + ttl_s} for token in tokens]
        async with self._db.writing("add_tokens") as tx:
            await tx.execute(insert(tables.Token), rows)
        journal.tokens_made(len(tokens), ttl_s)

    async def enrol(self, enrolment: Enrolment, claims: Claims, now: float) -> None:
        """Use a token for a new client; the same enrolment again is the same. Raises `Refused`, `ReplayedNonce`."""
        async with self._db.writing("enrol") as tx:
            token = await tx.get(tables.Token, _hash(enrolment.token), with_for_update=True)  # it is good for one
            client = await tx.get(tables.Client, enrolment.client)
            _check_enrolment(enrolment, token, client, now)
            await _remember(tx, claims)
            if client is not None:
                return
            row = {
                "id": enrolment.client,
                "public_key": enrolment.public_key_bytes,
                "labels": json.dumps(dict(enrolment.labels), sort_keys=True),
                "enrolled_at": now,
                "last_heard_at": now,
            }
            await tx.execute(insert(tables.Client).values(row))
            used = update(tables.Token).where(tables.Token.sha256 == _hash(enrolment.token))
            await tx.execute(used.values(used_by=enrolment.client))
        journal.enrolled(enrolment.client, enrolment.labels)

    async def revoke(self, name: str, now: float) -> bool:
        """Take a client's right to speak; False if there is no such client."""
        async with self._db.writing("revoke") as tx:
            row = await tx.get(tables.Client, name)
            if row is None:
                return False
            is_new = row.revoked_at is None
            row.revoked_at = row.revoked_at or now
        self._revoked.add(name)
        self._known.pop(name, None)
        if is_new:
            journal.revoked(name)
        return True


def _check_enrolment(
    enrolment: Enrolment, token: tables.Token | None, client: tables.Client | None, now: float
) -> None:
    """Refuse an enrolment unless its token is good for this name, and the name for this key."""
    if token is None:
        raise Refused("unknown-token", "this token was never issued here; ask the coordinator's operator for one")
    key_matches = client is not None and client.public_key == enrolment.public_key_bytes
    if token.used_by is not None and not (token.used_by == enrolment.client and key_matches):
        raise Refused("token-used", "this token enrolled another client; ask the coordinator's operator for a new one")
    if client is not None and (not key_matches or client.revoked_at is not None):
        raise Refused("name-taken", f"a client named {enrolment.client!r} exists with another key; take another name")
    if token.used_by is None and token.expires_at <= now:
        raise Refused("expired-token", "this token has expired; ask the coordinator's operator for a new one")


async def _remember(tx: AsyncSession, claims: Claims) -> None:
    try:
        await tx.execute(insert(tables.Nonce).values(_nonce_row(claims)))
    except IntegrityError as error:
        raise _replayed() from error


def _nonce_row(claims: Claims) -> dict[str, object]:
    return {"client": claims.key_id, "nonce": claims.nonce, "expires_at": int(claims.created + CLOCK_SKEW_S + 1)}


def _nonce_rows(batch: Sequence[_Seen]) -> list[dict[str, object]]:
    """In one order at every replica: two that lock the same rows in different orders would wait for each other."""
    return [_nonce_row(seen.claims) for seen in sorted(batch, key=lambda one: (one.claims.key_id, one.claims.nonce))]


def _heard_rows(batch: Sequence[_Seen]) -> list[dict[str, object]]:
    newest: dict[str, float] = {}
    for seen in batch:
        newest[seen.claims.key_id] = max(seen.at, newest.get(seen.claims.key_id, seen.at))
    return [{"id": client, "last_heard_at": at} for client, at in sorted(newest.items())]


def _replayed() -> ReplayedNonce:
    return ReplayedNonce("this signed request was seen before; sign each attempt afresh")


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
