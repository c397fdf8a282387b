"""Recognizes a database that does not answer, and logs it once a minute instead of once for every request."""

import logging
import os
import re
import time
from types import TracebackType

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from umbel.aggregation.phrases import counted

_log = logging.getLogger(__name__)
REPEAT_S = 60.0
_NEW_OUTAGE_S = 5.0  # at least, between the log lines of two outages
_REASON_CHARS_MAX = 200
_AWAY_SQLSTATES = (
    "08",  # no connection
    "28",  # access denied
    "3D",  # no such database
    "53",  # too many connections, disk full
    "57P",  # the server shuts down, has crashed or starts up
)


class DatabaseAway(Exception):
    """The database does not answer, which is logged already. Retry."""


class DatabaseOutage:
    """A context around every transaction: raises `DatabaseAway` if the database does not answer."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._logged_at = float("-inf")
        self._is_logged = False
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
        self._since = now if self._since is None else self._since
        self._n_failed += 1
        if now - self._logged_at < (REPEAT_S if self._is_logged else _NEW_OUTAGE_S):
            return
        _log.error(
            "the database does not answer (%s): clients are asked to retry (%s failed so far)",
            why,
            counted(self._n_failed, "transaction"),
        )
        self._logged_at, self._is_logged = now, True

    def _answered(self) -> None:
        if self._since is None:
            return
        if self._is_logged:
            away_s = time.monotonic() - self._since
            n_failed = counted(self._n_failed, "transaction")
            _log.info("the database answers again after %.1f s; %s failed", away_s, n_failed)
            self._n_failed = 0
        self._since, self._is_logged = None, False


def why_away(error: BaseException) -> str | None:
    """Why the database does not answer, from the error of a transaction; None if the error has another cause.

    SQLAlchemy wraps a driver's error in `DBAPIError`, but some versions do not before there is a connection. A command
    that takes too long is a `TimeoutError`, which is an `OSError`.
    """
    match error:
        case DBAPIError():
            state: str = getattr(error.orig, "sqlstate", None) or ""
            is_away = error.connection_invalidated or state.startswith(_AWAY_SQLSTATES)
            return _first_line(error.orig) if is_away else None
        case OSError() | NoConnectionLeft():
            return _first_line(error)
        case _:
            return _first_line(error) if type(error).__module__.startswith("asyncpg") else None


def _first_line(error: BaseException | None) -> str:
    """The first line of an error's text, without error numbers and class names."""
    if isinstance(error, OSError) and error.errno:
        is_unknown_host = error.errno < 0
        return str(error.strerror) if is_unknown_host else os.strerror(error.errno)
    text = re.sub(r"^<class '[^']*'>: ", "", str(error))
    return (text or type(error).__name__).splitlines()[0][:_REASON_CHARS_MAX]
