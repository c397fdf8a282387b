"""Since when no coordinator could take reports: what a round's window does not count.

While they work, coordinators leave a sign of life in the database, every second. A gap between two says that all of
them were down, or cut off from the database; a machine that slept leaves one too. A gap is measured on one clock, that
of PostgreSQL if it is there: or a coordinator that is ahead of the others would take each start of its own for one.
"""

from sqlalchemy import ColumnElement, func, literal, select
from sqlalchemy.dialects import postgresql, sqlite

from umbel.aggregation.round.states import Outage
from umbel.server.clock import Clock
from umbel.server.store import tables
from umbel.server.store.clock_check import database_now
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

SIGN_S = 1.0
OUTAGE_S = 3.0
"""A shorter gap is none: a busy disk, a failover to another replica."""
_SIGN, _ID = table_of(tables.SignOfLife), 1


class Uptime:
    """The signs of life."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db = database
        self._clock = clock
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert
        self._last = float("-inf")  # as far as this coordinator knows

    async def outage(self) -> Outage | None:
        """The time in which nobody could take reports, if no coordinator has signed since."""
        now = self._clock.now()
        if now - self._last <= OUTAGE_S:
            return None
        gap_s = self._now() - _SIGN.c.at
        async with self._db.reading() as tx:
            away_s = (await tx.execute(select(gap_s))).scalar_one_or_none()
        if away_s is None:
            return None
        self._last = max(self._last, now - away_s)
        return Outage(now - away_s, now) if away_s > OUTAGE_S else None

    async def sign(self) -> None:
        """Leave a sign of life, unless the last one is fresh. To be called when all runs were told of an outage."""
        now = self._clock.now()
        if now - self._last < SIGN_S:
            return
        statement = self._insert(_SIGN).values(id=_ID, at=self._now())
        latest = func.max if self._db.is_sqlite else func.greatest
        later = {"at": latest(_SIGN.c.at, statement.excluded.at)}
        async with self._db.writing("sign_of_life") as tx:
            await tx.execute(statement.on_conflict_do_update(index_elements=["id"], set_=later))
        self._last = now

    def _now(self) -> ColumnElement[float]:
        """The time on the clock that all who write to this database share."""
        return literal(self._clock.now()) if self._db.is_sqlite else database_now()
