"""Compares this machine's clock with the database's, and measures for how long no coordinator could take reports.

Round windows, the count of waiting clients and the age of signatures (`CLOCK_SKEW_S`) depend on the clock. If the
clocks of two coordinators differ by minutes, rounds end early, and one coordinator refuses honest clients.
"""

import logging
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Double, cast, extract, func, literal, select
from sqlalchemy.dialects import postgresql, sqlite

from umbel.aggregation.round.states import Outage
from umbel.server.clock import Clock
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

APART_MAX_S = 10.0
APART_WARN_S = 1.0
_log = logging.getLogger(__name__)


class ClockApart(Exception):
    """This machine's clock differs too much from the database's. The text says what to do."""


def ahead_s(before: float, theirs: float, after: float) -> float:
    """By how much another clock is at least ahead of ours (negative: behind), if read between `before` and `after`."""
    return max(theirs - after, 0.0) + min(theirs - before, 0.0)


def database_now() -> ColumnElement[float]:
    """The time on a PostgreSQL server's clock when it evaluates this row, in Unix seconds."""
    return cast(extract("epoch", func.clock_timestamp()), Double)


async def require_agreement(database: Database, clock: Clock) -> None:
    """Raise `ClockApart` if the clock differs too much from the database's. SQLite uses this machine's clock."""
    if database.is_sqlite:
        return
    async with database.reading() as tx:
        before = clock.now()
        theirs = (await tx.execute(select(database_now()))).scalar_one()
        after = clock.now()
    if abs(apart_s := ahead_s(before, theirs, after)) > APART_MAX_S:
        raise ClockApart(f"{_words(apart_s)}, but at most {APART_MAX_S:g} s are allowed: set both by NTP, then start")


@dataclass(slots=True)
class ClockWatch:
    """Warns once when the database's clock and ours begin to differ, and again after they agreed."""

    _has_warned: bool = False

    def note(self, apart_s: float) -> None:
        is_apart = abs(apart_s) > APART_WARN_S
        if is_apart and not self._has_warned:
            _log.warning("%s: windows close and signatures expire by the clock; set both by NTP", _words(apart_s))
        self._has_warned = is_apart


def _words(apart_s: float) -> str:
    side = "behind" if apart_s > 0 else "ahead of"
    return f"this machine's clock is {abs(apart_s):.1f} s {side} the database's"


SIGN_S = 1.0
OUTAGE_S = 3.0  # a shorter gap is a busy disk, or a failover to another replica
_SIGN, _ID = table_of(tables.SignOfLifeRow), 1


class Uptime:
    """Since when a coordinator works on this database: each writes the time into one row every `SIGN_S`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db = database
        self._clock = clock
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert
        self._last = float("-inf")  # sign that this coordinator knows of

    async def outage(self) -> Outage | None:
        """The time in which no coordinator could take reports, if it has not been recorded yet."""
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
        """Write a sign of life unless the last one is fresh. Call it after all runs have stored an outage."""
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
        """The time on the clock that all coordinators of this database share."""
        return literal(self._clock.now()) if self._db.is_sqlite else database_now()
