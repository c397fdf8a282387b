"""Clients that are refused at check-in, and why: whoever waits for them should hear of it."""

from sqlalchemy import delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.run.records import TurnedAway
from umbel.aggregation.types import ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

KEPT_MAX = 100
SHOWN_MAX = 20
_SAME_AGAIN_S = 60.0  # a client that keeps knocking costs a write a minute
_OTHER_AGAIN_S = 5.0  # and one whose reason changes at each knock a write in so many seconds
_KEPT_S = 7 * 86400.0
_AWAY, _WAITER = table_of(tables.TurnedAwayRow), table_of(tables.WaiterRow)


class TurnedAwayStore:
    """One row for each client that a run has refused: its last refusal. Of a run, the newest `KEPT_MAX` are kept."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert

    async def note(self, run: RunId, client: ClientId, reason: str, now: float, in_place_of: str = "") -> bool:
        """Store a refusal, in place of this client's last one; False if that was stored a moment ago.

        `in_place_of`: says less of the same refusal, and is not waited for.
        """
        mine = (_AWAY.c.run == run, _AWAY.c.client == client)
        is_same = (_AWAY.c.reason == reason) & (_AWAY.c.at > now - _SAME_AGAIN_S)
        is_other = (_AWAY.c.reason != in_place_of) & (_AWAY.c.at > now - _OTHER_AGAIN_S)
        fresh = select(_AWAY.c.at).where(*mine, or_(is_same, is_other))
        async with self._db.reading() as tx:
            if (await tx.execute(fresh)).first() is not None:
                return False
        row = {"run": run, "client": client, "reason": reason, "at": now}
        upsert = self._insert(_AWAY).on_conflict_do_update(
            index_elements=["run", "client"], set_={"reason": reason, "at": now}
        )
        async with self._db.writing("note_turned_away") as tx:
            await tx.execute(upsert, [row])
            await _forget_oldest(tx, run)
        return True

    async def sweep(self, now: float) -> None:
        """Drop refusals of more than a week ago."""
        async with self._db.writing("sweep_turned_away") as tx:
            await tx.execute(delete(_AWAY).where(_AWAY.c.at <= now - _KEPT_S))

    async def newest(self, run: RunId) -> tuple[TurnedAway, ...]:
        """Those that have not been let in since, the newest first; at most `SHOWN_MAX`."""
        since = (_WAITER.c.run == _AWAY.c.run) & (_WAITER.c.client == _AWAY.c.client)
        query = (
            select(_AWAY)
            .outerjoin(_WAITER, since)
            .where(_AWAY.c.run == run, or_(_WAITER.c.seen_at.is_(None), _WAITER.c.seen_at < _AWAY.c.at))
            .order_by(_AWAY.c.at.desc(), _AWAY.c.client)
            .limit(SHOWN_MAX)
        )
        async with self._db.reading() as tx:
            return tuple(TurnedAway(row.client, row.reason, row.at) for row in await tx.execute(query))


async def _forget_oldest(tx: AsyncConnection, run: RunId) -> None:
    """Drop all but the newest. Rows that another replica is writing are passed over, so that none waits for another."""
    newest_first = select(_AWAY.c.client).where(_AWAY.c.run == run).order_by(_AWAY.c.at.desc(), _AWAY.c.client)
    surplus = (await tx.scalars(newest_first.offset(KEPT_MAX).with_for_update(skip_locked=True))).all()
    if surplus:
        await tx.execute(delete(_AWAY).where(_AWAY.c.run == run, _AWAY.c.client.in_(surplus)))
