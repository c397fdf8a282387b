"""Whether this machine's clock agrees with the database's, by which all its coordinators can be compared.

Windows close by the clock, waiting clients are counted by it, and a signature is fresh by it (`CLOCK_SKEW_S`): clocks
that are minutes apart end rounds early and refuse honest clients at one coordinator of several.
"""

import logging
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Double, cast, extract, func, select

from umbel.server.clock import Clock
from umbel.server.store.database import Database

APART_MAX_S = 10.0
APART_WARN_S = 1.0
_log = logging.getLogger(__name__)


class ClockApart(Exception):
    """This machine's clock is too far from the database's. One sentence that says what to do."""


def ahead_s(before: float, theirs: float, after: float) -> float:
    """How far another clock, read between `before` and `after` on ours, is surely ahead of it (negative: behind)."""
    return max(theirs - after, 0.0) + min(theirs - before, 0.0)


def database_now() -> ColumnElement[float]:
    """The time on a PostgreSQL server's clock as it gets to this row, in Unix seconds."""
    return cast(extract("epoch", func.clock_timestamp()), Double)


async def require_agreement(database: Database, clock: Clock) -> None:
    """Raise `ClockApart` for a clock that is not the database's. SQLite has no clock but this machine's."""
    if database.is_sqlite:
        return
    async with database.reading() as tx:
        before = clock.now()
        theirs = (await tx.execute(select(database_now()))).scalar_one()
        after = clock.now()
    if abs(apart_s := ahead_s(before, theirs, after)) > APART_MAX_S:
        raise ClockApart(f"{_words(apart_s)}, and at most {APART_MAX_S:g} s are allowed: set both by NTP, then start")


@dataclass(slots=True)
class ClockWatch:
    """Warns when the database's clock and ours have come apart: once, until they agree again."""

    _has_warned: bool = False

    def note(self, apart_s: float) -> None:
        is_apart = abs(apart_s) > APART_WARN_S
        if is_apart and not self._has_warned:
            _log.warning("%s: windows close, and signatures age, by the clock; set both by NTP", _words(apart_s))
        self._has_warned = is_apart


def _words(apart_s: float) -> str:
    side = "behind" if apart_s > 0 else "ahead of"
    return f"this machine's clock is {abs(apart_s):.1f} s {side} the database's"
