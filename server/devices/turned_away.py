"""Why clients do not come to a run: the coordinator refused their check-in, or they say so themselves."""

from sqlalchemy import Select, delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.run.records import AwayKind, TurnedAway
from umbel.aggregation.types import ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

KEPT_MAX = 100
SHOWN_MAX = 20
KEPT_S = 86400.0  # not longer than a check-in is remembered, which shows that a client has come since
_SAME_AGAIN_S = 60.0  # the same reason of one client is written once a minute
_OTHER_AGAIN_S = 5.0  # and a changed reason once in five seconds
_REFUSAL_STANDS_S = 900.0  # a process whose check-in is refused fails, and is tried again after 10 minutes at most
_AWAY, _WAITER, _CLIENT = map(table_of, (tables.TurnedAwayRow, tables.WaiterRow, tables.ClientRow))
_HAS_COME = (
    select(_WAITER.c.seen_at)
    .where(_WAITER.c.run == _AWAY.c.run, _WAITER.c.client == _AWAY.c.client, _WAITER.c.seen_at >= _AWAY.c.at)
    .exists()
)


class TurnedAwayStore:
    """For each client of a run: the last refusal of its check-in, or its own statement that it does not come.

    The newest `KEPT_MAX` of each run are kept, for a day.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert

    async def note(self, run: RunId, away: TurnedAway, in_place_of: str = "") -> bool:
        """Store why a client does not come, in place of what was stored. False if that stays.

        `in_place_of`: a less detailed reason for the same refusal, which this one may replace at once.
        """
        stays = [
            (_AWAY.c.reason == away.reason) & (_AWAY.c.kind == away.kind) & (_AWAY.c.at > away.at - _SAME_AGAIN_S),
            (_AWAY.c.reason != in_place_of) & (_AWAY.c.at > away.at - _OTHER_AGAIN_S),
        ]
        if away.kind is AwayKind.NOT_READY:  # the refusal says more than that the client's process has ended
            stays.append((_AWAY.c.kind == AwayKind.TURNED_AWAY) & (_AWAY.c.at > away.at - _REFUSAL_STANDS_S))
        kept = select(_AWAY.c.at).where(_AWAY.c.run == run, _AWAY.c.client == away.client, ~_HAS_COME, or_(*stays))
        async with self._db.reading() as tx:
            if (await tx.execute(kept)).first() is not None:
                return False
        news = {"reason": away.reason, "at": away.at, "kind": away.kind.value}
        upsert = self._insert(_AWAY).on_conflict_do_update(index_elements=["run", "client"], set_=news)
        async with self._db.writing("note_turned_away") as tx:
            await tx.execute(upsert, [{"run": run, "client": away.client, **news}])
            await _forget_oldest(tx, run)
        return True

    async def sweep(self, now: float) -> None:
        """Drop what is older than a day."""
        async with self._db.writing("sweep_turned_away") as tx:
            await tx.execute(delete(_AWAY).where(_AWAY.c.at <= now - KEPT_S))

    async def newest(self, run: RunId, now: float) -> tuple[TurnedAway, ...]:
        """The clients that have not come since, the newest first; at most `SHOWN_MAX`."""
        query = _current(run, now).order_by(_AWAY.c.at.desc(), _AWAY.c.client).limit(SHOWN_MAX)
        async with self._db.reading() as tx:
            rows = await tx.execute(query)
            return tuple(TurnedAway(row.client, row.reason, row.at, AwayKind(row.kind)) for row in rows)

    async def staying_away(self, run: RunId, now: float) -> frozenset[ClientId]:
        """The clients that have not come since and that no round needs to wait for: all but those that may come."""
        query = _current(run, now).where(_AWAY.c.kind != AwayKind.NOT_READY)
        async with self._db.reading() as tx:
            return frozenset(ClientId(row.client) for row in await tx.execute(query))


def _current(run: RunId, now: float) -> Select[tuple[object, ...]]:
    return (
        select(_AWAY)
        .join(_CLIENT, _CLIENT.c.id == _AWAY.c.client)
        .where(_AWAY.c.run == run, _AWAY.c.at > now - KEPT_S, _CLIENT.c.revoked_at.is_(None), ~_HAS_COME)
    )


async def _forget_oldest(tx: AsyncConnection, run: RunId) -> None:
    """Keep the newest only. Rows that another replica is writing are skipped, so that no replica waits for another."""
    newest_first = select(_AWAY.c.client).where(_AWAY.c.run == run).order_by(_AWAY.c.at.desc(), _AWAY.c.client)
    surplus = (await tx.scalars(newest_first.offset(KEPT_MAX).with_for_update(skip_locked=True))).all()
    if surplus:
        await tx.execute(delete(_AWAY).where(_AWAY.c.run == run, _AWAY.c.client.in_(surplus)))
