"""When the database is away: told from all other errors, answered 503, and logged in a line a minute.

Everything asks the database several times a second, so each failure by itself would bury the one line that says why.
"""

import logging
import os
import re
import time
from types import TracebackType

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

_log = logging.getLogger(__name__)
REPEAT_S = 60.0
_APART_S = 5.0  # a database that comes and goes tells of itself no more often
_REASON_CHARS_MAX = 200
# SQLSTATEs that begin so: no connection, not let in, no such database, no room (for a connection, on the disk), and
# that the server shuts down, has crashed, or starts up.
_STATES = ("08", "28", "3D", "53", "57P")


class DatabaseAway(Exception):
    """The database does not answer. It is logged already; whoever catches this tries again."""


class DatabaseOutage:
    """Wraps every transaction: `with outage: ...` raises `DatabaseAway` for what is no fault of the transaction."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._told_at = float("-inf")
        self._is_told = False
        self._n_failed = 0

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._answered()
        elif (why := why_away(error)) is not None:
            self._failed(why)
            raise DatabaseAway(why) from error

    def _failed(self, why: str) -> None:
        now = time.monotonic()
        is_new = self._since is None
        self._since = now if self._since is None else self._since
        self._n_failed += 1
        if now - self._told_at < (_APART_S if is_new else REPEAT_S):
            return
        _log.error(
            "the database does not answer (%s): clients are asked to retry (%d requests failed so far)",
            why,
            self._n_failed,
        )
        self._told_at, self._is_told = now, True

    def _answered(self) -> None:
        if self._since is None:
            return
        if self._is_told:
            away_s = time.monotonic() - self._since
            _log.info("the database answers again after %.1f s; %d transactions failed", away_s, self._n_failed)
            self._n_failed = 0
        self._since, self._is_told = None, False


def why_away(error: BaseException) -> str | None:
    """Why the database does not answer, if that is what this error of a transaction says.

    What the driver says comes in SQLAlchemy's `DBAPIError`; before there is a connection, from some versions, as it is.
    A command that takes too long is a `TimeoutError`, which is an `OSError`.
    """
    match error:
        case DBAPIError():
            state: str = getattr(error.orig, "sqlstate", None) or ""
            is_away = error.connection_invalidated or state.startswith(_STATES)
            return _first_line(error.orig) if is_away else None
        case OSError() | NoConnectionLeft():
            return _first_line(error)
        case _:
            return _first_line(error) if type(error).__module__.startswith("asyncpg") else None


def _first_line(error: BaseException | None) -> str:
    """In one line, and without what only programmers read: the number of an error, the names of classes."""
    if isinstance(error, OSError) and error.errno:
        return (
            os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
        )  # below 0: of a name that is not found
    text = re.sub(r"^<class '[^']*'>: ", "", str(error))
    return (text or type(error).__name__).splitlines()[0][:_REASON_CHARS_MAX]
