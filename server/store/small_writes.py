"""Small transactions that come thousands of times a second: statements compiled once, and SQLite's own connection.

The SQL is SQLAlchemy's own, for the database at hand. What is saved is about ten microseconds a row.
"""

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy import Executable
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import CompilerElement


@dataclass(frozen=True, slots=True)
class Write:
    """A statement in the database's own SQL, and the rows that it writes, by position."""

    sql: str
    rows: Sequence[tuple[object, ...]]


class Prepared:
    """A statement for rows of plain numbers and strings. `columns`: the names of its parameters, as a row has them."""

    def __init__(self, statement: Executable, dialect: Dialect, columns: Sequence[str]) -> None:
        assert isinstance(statement, CompilerElement)
        compiled = statement.compile(dialect=dialect, column_keys=list(columns))
        assert isinstance(compiled, SQLCompiler)
        assert compiled.positiontup is not None, "both databases' drivers take parameters by position"
        assert sorted(compiled.positiontup) == sorted(columns), "each parameter once"
        self._sql = str(compiled)
        self._order = [list(columns).index(name) for name in compiled.positiontup]

    def of(self, rows: Iterable[Sequence[object]]) -> Write:
        """The statement for these rows, each in the order of `columns`."""
        order = self._order
        if order == sorted(order):
            return Write(self._sql, [tuple(row) for row in rows])
        return Write(self._sql, [tuple(row[i] for i in order) for row in rows])

    async def execute(self, tx: AsyncConnection, rows: Iterable[Sequence[object]]) -> None:
        """Write all these rows, each in the order of `columns`."""
        if (write := self.of(rows)).rows:
            await tx.exec_driver_sql(write.sql, list(write.rows))


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
