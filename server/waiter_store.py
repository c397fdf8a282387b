"""Who waits for work, as it is stored: the one list of which every replica draws a run's cohorts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from umbel.aggregation.types import ClientId, RunId
from umbel.aggregation.weighting import Candidate
from umbel.server import tables
from umbel.server.batching import Batcher
from umbel.server.database import Database
from umbel.server.tables import table_of

_WAITER = table_of(tables.Waiter)
_KEPT_S = 24 * 3600.0  # a client that was here within a day is one of the fleet


@dataclass(frozen=True, slots=True)
class Waiting:
    """A client that has checked in, and until when it counts as waiting. Times in Unix seconds."""

    run: RunId
    client: ClientId
    sample_count: int
    tier: str
    seen_at: float
    until: float


class WaiterStore:
    """The rows of the waiting room."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert
        self._batcher = Batcher(self._put)

    def note(self, waiter: Waiting) -> "asyncio.Future[None]":
        """Store this, together with what others note meanwhile; done when it is stored."""
        return self._batcher.add(waiter)

    async def settle(self) -> None:
        """Wait until everything that was noted is stored."""
        await self._batcher.settle()

    async def _put(self, waiters: Sequence[Waiting]) -> None:
        """Of one client the word about its newest check-in counts."""
        newest: dict[tuple[str, str], Waiting] = {}
        for waiter in waiters:
            known = newest.get((waiter.run, waiter.client), waiter)
            newest[waiter.run, waiter.client] = max(waiter, known, key=lambda one: one.seen_at)
        rows = [
            {
                "run": waiter.run,
                "client": waiter.client,
                "sample_count": waiter.sample_count,
                "tier": waiter.tier,
                "seen_at": waiter.seen_at,
                "until": waiter.until,
            }
            for _, waiter in sorted(newest.items())
        ]
        statement = self._insert(_WAITER)
        changed = {name: statement.excluded[name] for name in ("sample_count", "tier", "seen_at", "until")}
        upsert = statement.on_conflict_do_update(
            index_elements=["run", "client"], set_=changed, where=statement.excluded.seen_at >= _WAITER.c.seen_at
        )
        async with self._db.writing("put_waiters") as tx:
            await tx.execute(upsert, rows)

    async def candidates(self, run: RunId, now: float) -> tuple[Candidate, ...]:
        """Everyone who waits in a run now."""
        query = select(_WAITER.c.client, _WAITER.c.sample_count, _WAITER.c.tier)
        async with self._db.reading() as tx:
            rows = await tx.execute(query.where(_WAITER.c.run == run, _WAITER.c.until > now))
            return tuple(Candidate(ClientId(row.client), row.sample_count, row.tier) for row in rows)

    async def population(self, run: RunId, now: float) -> int:
        """How many clients have checked in for a run within a day."""
        query = select(func.count()).select_from(_WAITER).where(_WAITER.c.run == run, _WAITER.c.seen_at > now - _KEPT_S)
        async with self._db.reading() as tx:
            return int((await tx.execute(query)).scalar_one())

    async def sweep(self, now: float) -> None:
        """Drop those that have not been here for a day."""
        async with self._db.writing("sweep_waiters") as tx:
            await tx.execute(delete(_WAITER).where(_WAITER.c.seen_at <= now - _KEPT_S))
