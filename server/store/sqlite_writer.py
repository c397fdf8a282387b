"""SQLite's own connection for small transactions that come thousands of times a second: each in one trip to a thread.

SQLAlchemy's driver goes to a thread and back for every statement, for the begin and for the commit. Of a transaction
that writes a hundred rows, most of the processor's time is then spent on the way.
"""

import asyncio
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy.exc import DBAPIError

from umbel.server.store.prepared import Write

PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA busy_timeout=10000",
    "PRAGMA foreign_keys=ON",
)
"""Of every connection: journal ahead of writing, sync every commit to disk, wait for other processes, hold foreign
keys."""


class SqliteWriter:
    """A connection of its own, opened when it is first needed, and the one thread that may use it.

    Whoever calls has the turn to write: transactions here and elsewhere in this process do not wait for one another's
    locks.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "umbel-sqlite")
        self._connection: sqlite3.Connection | None = None

    async def write(self, writes: Sequence[Write]) -> None:
        """Write all of it or nothing; on return it is on disk. Raises SQLAlchemy's errors, as its engine would."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._write, writes)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])  # whoever has the turn next must not find the file locked
            running.exception()  # nobody is there to hear of it
            raise
        except sqlite3.Error as error:
            sql = "; ".join(one.sql for one in writes)
            raise DBAPIError.instance(sql, None, error, sqlite3.Error) from error

    async def close(self) -> None:
        """Close the connection, after what is under way."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _write(self, writes: Sequence[Write]) -> None:
        if self._connection is None:
            self._connection = opened(self._path)
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            for one in writes:
                cursor.executemany(one.sql, one.rows)
            cursor.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # some errors have rolled it back already
                cursor.execute("ROLLBACK")
            raise
        finally:
            cursor.close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def opened(path: str) -> sqlite3.Connection:
    """A connection for the thread that calls, whose transactions are begun by hand."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in PRAGMAS:
        connection.execute(pragma)
    return connection
