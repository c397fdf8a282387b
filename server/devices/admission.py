"""Signed requests are admitted in batches, whose nonces are stored in one transaction.

A request is admitted when its nonce is durable, so that no crash and no other replica lets it pass a second time. What
a check-in changes is stored with its nonce.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter

from sqlalchemy import bindparam, delete, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.errors import ReplayedNonce
from umbel.aggregation.trust.signatures import CLOCK_SKEW_S, Claims
from umbel.server.store import tables
from umbel.server.store.batches import Batches
from umbel.server.store.database import Database, Prepared
from umbel.server.store.tables import table_of
from umbel.server.store.waiters import WaiterStore, Waiting

_HEARD_EVERY_S = 30.0
_HEARD_ROWS_MAX = 100
_NONCES = insert(table_of(tables.NonceRow))
_KEY = tuple_(tables.NonceRow.expires_at, tables.NonceRow.client, tables.NonceRow.nonce)
_HEARD = (
    update(tables.ClientRow).where(tables.ClientRow.id == bindparam("client")).values(last_heard_at=bindparam("at"))
)


@dataclass(frozen=True, slots=True)
class Signed:
    """A request whose signature was verified at the time `now`. `waiting`: what it changes in the waiting room."""

    claims: Claims
    now: float
    waiting: Waiting | None = None


class Admission:
    """Stores the nonces of signed requests, and with them what is not worth its own transaction."""

    def __init__(self, database: Database, waiters: WaiterStore) -> None:
        self._db = database
        self._waiters = waiters
        self._batches: Batches[Signed, None] = Batches(self._admit)
        self._nonces = Prepared(_NONCES, database.dialect, ("expires_at", "client", "nonce"))
        self._heard_rows = Prepared(_HEARD, database.dialect, ("client", "at"))
        self._heard: dict[str, float] = {}
        self._heard_since = float("-inf")
        self._storing: dict[str, float] = {}

    async def admit(self, signed: Signed) -> None:
        """Store the request's nonce. Raises `ReplayedNonce`, and stores nothing, if it was stored before."""
        await self._batches.do(signed)

    def heard_at(self, client: str) -> float:
        """When a client's last request was admitted here, in Unix seconds; 0 if the database has the same time."""
        return self._heard.get(client) or self._storing.get(client, 0.0)

    async def _admit(self, batch: Sequence[Signed]) -> Sequence[ReplayedNonce | None]:
        """Store a batch, without its replays.

        They are found by a query. Halving the batch until each request is alone would let a client that repeats one
        request slow down all others.
        """
        try:
            await self._store(batch)
        except IntegrityError:
            if len(batch) == 1:
                return [replayed()]
            is_fresh = await self._which_are_fresh(batch)
            if all(is_fresh):  # another replica was faster just now
                raise
            await self._store([signed for signed, fresh in zip(batch, is_fresh, strict=True) if fresh])
            return [None if fresh else replayed() for fresh in is_fresh]
        return [None] * len(batch)

    async def _which_are_fresh(self, batch: Sequence[Signed]) -> Sequence[bool]:
        """For each request: whether its nonce is neither stored nor used earlier in the batch."""
        keys = [_key(signed.claims) for signed in batch]
        async with self._db.reading() as tx:
            stored = await tx.execute(select(*_KEY.clauses).where(_KEY.in_(keys)))
            seen = {tuple(row) for row in stored}
        is_fresh: list[bool] = []
        for key in keys:
            is_fresh.append(key not in seen)
            seen.add(key)
        return is_fresh

    async def _store(self, batch: Sequence[Signed]) -> None:
        """Write all nonces in one transaction, with some clients' times of last contact and the clients that left."""
        if not batch:
            return
        heard, left = self._next_heard(batch[-1].now), self._waiters.take_noted()
        nonces = self._nonces.of(_ordered(signed.claims for signed in batch))
        waiting = self._waiters.writes([*left, *(signed.waiting for signed in batch if signed.waiting)])
        try:
            await self._db.write("admit", (nonces, self._heard_rows.of(sorted(heard.items())), *waiting))
        except BaseException:
            self._waiters.note_all(left)
            raise
        self._note_stored(heard)
        self._heard.update((signed.claims.key_id, signed.now) for signed in batch)

    def _next_heard(self, now: float) -> Mapping[str, float]:
        """The next few times of last contact to store. Each client's is stored about every half minute."""
        if not self._storing and now - self._heard_since >= _HEARD_EVERY_S:
            self._storing, self._heard, self._heard_since = self._heard, {}, now
        return dict(islice(self._storing.items(), _HEARD_ROWS_MAX))

    def _note_stored(self, heard: Mapping[str, float]) -> None:
        for client in heard:
            self._storing.pop(client, None)

    async def forget_nonces(self, now: float) -> None:
        """Drop expired nonces, one second's worth per transaction, so that others can write in between."""
        oldest = select(tables.NonceRow.expires_at).order_by(tables.NonceRow.expires_at).limit(1)
        while True:
            async with self._db.writing("forget_nonces") as tx:
                found = (await tx.execute(oldest)).scalar()
                if found is None or found >= now:
                    return
                await tx.execute(delete(tables.NonceRow).where(tables.NonceRow.expires_at < min(found + 1, now)))

    async def store_heard(self) -> None:
        """Store all times of last contact that are not stored yet."""
        self._storing, self._heard = self._storing | self._heard, {}
        while self._storing:
            heard = dict(islice(self._storing.items(), _HEARD_ROWS_MAX))
            await self._db.write("store_heard", [self._heard_rows.of(sorted(heard.items()))])
            self._note_stored(heard)

    async def remember(self, tx: AsyncConnection, claims: Iterable[Claims]) -> None:
        """Store nonces until their signatures expire. Raises `IntegrityError` for one that is stored already."""
        await self._nonces.execute(tx, _ordered(claims))


def _key(claims: Claims) -> tuple[int, str, str]:
    """What a request and its replays share, in the order of the table's primary key."""
    return int(claims.created + CLOCK_SKEW_S + 1), claims.key_id, claims.nonce


def _ordered(claims: Iterable[Claims]) -> Sequence[tuple[int, str, str]]:
    """Their rows in one order at every replica, as all rows here, so that two replicas do not deadlock."""
    return sorted(map(_key, claims), key=itemgetter(1, 2))


def replayed() -> ReplayedNonce:
    return ReplayedNonce("this signed request was already received; sign each request afresh, with a new nonce")
