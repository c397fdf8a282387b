"""The database engine, its transactions and migrations, for SQLite and PostgreSQL.

There are thousands of small transactions a second. Their statements are compiled once (`Prepared`), and SQLite has a
connection of its own for them (`SqliteWriter`). Compared with SQLAlchemy's usual path this saves about ten microseconds
a row.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import Connection, Executable, event, text
from sqlalchemy.engine import Dialect, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.exc import DatabaseError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import CompilerElement

from umbel.server.store.outage import DatabaseOutage

_log = logging.getLogger(__name__)
_SLOW_S = 1.0
_SQLITE_CONNECTIONS = 4  # transactions are short and SQLite writes one at a time; each connection costs a thread
_POSTGRESQL_CONNECTIONS = 10
_COMMAND_S = 30.0  # then the transaction fails
_POSTGRESQL_SETTINGS = {
    "application_name": "umbel",
    "statement_timeout": "30s",
    # A replica that stops in a transaction, or whose host vanishes, holds its locks no longer than this.
    "idle_in_transaction_session_timeout": "3s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}
_MIGRATION_LOCK = 0x756D62656C  # "umbel": when replicas start together, one migrates while the others wait
_SNAPSHOT = "REPEATABLE READ"  # transactions that only read never fail under it
_MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True, slots=True)
class Write:
    """A statement in the database's SQL, and the rows that it writes. Parameters are positional."""

    sql: str
    rows: Sequence[tuple[object, ...]]


class Prepared:
    """A statement for rows of plain numbers and strings. `columns`: its parameters in the order of a row."""

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
    "PRAGMA synchronous=FULL",  # every commit is on disk
    "PRAGMA busy_timeout=10000",  # ms to wait for other processes
    "PRAGMA foreign_keys=ON",
)


class SqliteWriter:
    """A connection that is opened when first needed, and the one thread that may use it.

    Callers must hold this process's turn to write, so that its transactions do not wait for each other's locks.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "umbel-sqlite")
        self._connection: sqlite3.Connection | None = None

    async def write(self, writes: Sequence[Write]) -> None:
        """Write everything or nothing; on return it is on disk. Raises SQLAlchemy's errors."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._write, writes)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])  # the next writer must not find the file locked
            running.exception()  # mark it as retrieved
            raise
        except sqlite3.Error as error:
            sql = "; ".join(one.sql for one in writes)
            raise DBAPIError.instance(sql, None, error, sqlite3.Error) from error

    async def close(self) -> None:
        """Close the connection after the current transaction."""
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
    """A connection for the calling thread, which begins its transactions itself."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in PRAGMAS:
        connection.execute(pragma)
    return connection


class UnfitDatabase(Exception):
    """The stored rows do not fit the tables of this version. The text says what to do."""


class Database:
    """Short transactions, which raise `DatabaseAway` if PostgreSQL does not answer.

    A transaction must contain no network or file I/O.
    """

    def __init__(self, url: str) -> None:
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        self._url = url
        self._engine = (
            create_async_engine(url, pool_size=_SQLITE_CONNECTIONS, max_overflow=0)
            if self.is_sqlite
            else _postgresql_engine(url)
        )
        self._writer = self._engine.execution_options(writes=True)
        # All statements of a transaction read the same state. SQLite's transactions do so by default.
        self._reader = self._engine if self.is_sqlite else self._engine.execution_options(isolation_level=_SNAPSHOT)
        # SQLite has one writer at a time: queue here in order, instead of in its sleeping retries.
        self._turn = asyncio.Lock() if self.is_sqlite else nullcontext()
        self._bulk = SqliteWriter(make_url(url).database or "") if self.is_sqlite else None
        self._outage = nullcontext() if self.is_sqlite else DatabaseOutage()
        if self.is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
            event.listen(self._engine.sync_engine, "handle_error", _keep_connection)

    @property
    def dialect(self) -> Dialect:
        return self._engine.dialect

    @property
    def place(self) -> str:
        """The database's address without user and password, for messages."""
        url = make_url(self._url)
        host = url.host or url.query.get("host", "localhost")
        return f"{host}:{url.port or 5432}/{url.database}"

    async def migrate(self) -> None:
        """Bring the schema up to date, without a time limit. Raises `UnfitDatabase`."""
        engine = self._engine if self.is_sqlite else create_async_engine(self._url, poolclass=NullPool)
        try:
            with self._outage:
                async with engine.connect() as connection:
                    if not self.is_sqlite:
                        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
                    await connection.run_sync(upgrade)
                    await connection.commit()
        except DatabaseError as error:
            if getattr(error.orig, "sqlite_errorname", "") != "SQLITE_NOTADB":
                raise
            raise UnfitDatabase(
                f"{make_url(self._url).database} is damaged, or not a SQLite database; move it away, and restore the "
                "backup"
            ) from error

    async def close(self) -> None:
        if self._bulk is not None:
            await self._bulk.close()
        await self._engine.dispose()

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction that only reads. All its statements read the same state."""
        with self._outage:
            async with self._reader.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncGenerator[AsyncConnection]:
        """A transaction that is committed at the end of the block, or rolled back if the block raises."""
        started = time.perf_counter()
        with self._outage:
            async with self._turn, self._writer.begin() as connection:
                yield connection
        _warn_if_slow(name, started)

    async def write(self, name: str, writes: Iterable[Write]) -> None:
        """Write rows in one transaction, which is committed on return. Raises the same as `writing`.

        SQLite gets all statements in one trip to its thread; `writing` makes a trip for each statement. For thousands
        of small transactions, these trips cost more than the writes.
        """
        wanted, started = [one for one in writes if one.rows], time.perf_counter()
        if self._bulk is None:
            async with self.writing(name) as tx:
                for one in wanted:
                    await tx.exec_driver_sql(one.sql, list(one.rows))
            return
        async with self._turn:
            await self._bulk.write(wanted)
        _warn_if_slow(name, started)


def _warn_if_slow(name: str, started: float) -> None:
    if (took_s := time.perf_counter() - started) > _SLOW_S:
        _log.warning("transaction %s took %.1f s", name, took_s)


def _postgresql_engine(url: str) -> AsyncEngine:
    """Tests each connection before use, because a restart of the server ends the old ones."""
    limits = {"command_timeout": _COMMAND_S, "timeout": _COMMAND_S, "server_settings": _POSTGRESQL_SETTINGS}
    return create_async_engine(
        url, pool_size=_POSTGRESQL_CONNECTIONS, max_overflow=0, pool_pre_ping=True, connect_args=limits
    )


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run the packaged migrations up to revision `to` over an open connection. Raises `UnfitDatabase`."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, to)
    except CommandError as error:
        if not isinstance(error.__cause__, ResolutionError):
            raise
        raise UnfitDatabase(
            f"this version of umbel does not know the database's schema {error.__cause__.argument}: a newer version "
            "of umbel has changed the database. Install the newer version, or restore a backup from before the change"
        ) from error


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    raw: Any = connection
    raw.isolation_level = None  # `_begin_sqlite` begins transactions, because the driver would begin them too late
    cursor = connection.cursor()
    for pragma in PRAGMAS:
        cursor.execute(pragma)
    cursor.close()


def _keep_connection(context: ExceptionContext) -> None:
    """Keep the connection of a task that is cancelled in a transaction, so that the transaction is rolled back on it.

    SQLAlchemy would drop the connection, and a cursor that is still open would keep the write lock.
    """
    if isinstance(context.original_exception, asyncio.CancelledError):
        context.is_disconnect = False


def _begin_sqlite(connection: Connection) -> None:
    """Take the write lock at once if the transaction will write: upgrading a read lock later may deadlock."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
