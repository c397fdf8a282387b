"""The database's edge: the engine, its transactions, its migrations. The only place that knows SQLite from others."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import Dialect, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, ExceptionContext
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from umbel.server.store.outage import DatabaseOutage
from umbel.server.store.small_writes import PRAGMAS, SqliteWriter, Write

_log = logging.getLogger(__name__)
_SLOW_S = 1.0
_CONNECTIONS = 4  # transactions are short and SQLite writes one at a time; each connection costs a thread
_POSTGRESQL_CONNECTIONS = 10
_COMMAND_S = 30.0  # a server that does not answer is given up, and the transaction with it
_POSTGRESQL_SETTINGS = {
    "application_name": "umbel",
    "statement_timeout": "30s",
    # A replica that stops in the middle of a transaction, or whose host vanishes, holds no lock for longer than this.
    "idle_in_transaction_session_timeout": "3s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}
_MIGRATION_LOCK = 0x756D62656C  # "umbel": of replicas that start together, one migrates while the others wait
_SNAPSHOT = "REPEATABLE READ"  # transactions that only read never fail under it
_MIGRATIONS = Path(__file__).parent / "migrations"


class UnfitDatabase(Exception):
    """What stands in the tables does not fit into those of this version. One sentence that says what to do."""


class Database:
    """Named, short transactions, which raise `DatabaseAway` where PostgreSQL does not answer.

    No network or file I/O belongs inside one.
    """

    def __init__(self, url: str) -> None:
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        self._url = url
        self._engine = _sqlite_engine(url) if self.is_sqlite else _postgresql_engine(url)
        self._writer = self._engine.execution_options(writes=True)
        # Several statements that read see one state of the database. SQLite's transactions do so by themselves.
        self._reader = self._engine if self.is_sqlite else self._engine.execution_options(isolation_level=_SNAPSHOT)
        self._one_writer = asyncio.Lock() if self.is_sqlite else None
        self._bulk = SqliteWriter(make_url(url).database or "") if self.is_sqlite else None
        self._outage = (
            nullcontext() if self.is_sqlite else DatabaseOutage()
        )  # a file is there, or something is wrong with it
        if self._one_writer:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)
            event.listen(self._engine.sync_engine, "begin", _begin_sqlite)
            event.listen(self._engine.sync_engine, "handle_error", _keep_connection)

    @property
    def dialect(self) -> Dialect:
        return self._engine.dialect

    @property
    def place(self) -> str:
        """Where the database is, without user and password, for sentences."""
        url = make_url(self._url)
        host = url.host or url.query.get("host", "localhost")
        return f"{host}:{url.port or 5432}/{url.database}"

    @property
    def is_exclusive(self) -> bool:
        """Whether one process alone works on it: SQLite's file is in a directory that a coordinator locks."""
        return self.is_sqlite

    async def migrate(self) -> None:
        """Bring the schema up to date. Takes as long as it takes: the time limits of other transactions do not hold.

        Raises `UnfitDatabase`.
        """
        engine = self._engine if self.is_sqlite else create_async_engine(self._url, poolclass=NullPool)
        with self._outage:
            await self._migrate(engine)

    async def _migrate(self, engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            if not self.is_sqlite:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})
            await connection.run_sync(upgrade)
            await connection.commit()

    async def close(self) -> None:
        if self._bulk is not None:
            await self._bulk.close()
        await self._engine.dispose()

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction that only reads, one state of the database."""
        with self._outage:
            async with self._reader.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncGenerator[AsyncConnection]:
        """A transaction that is committed at the end of the block, or rolled back when it raises."""
        started = time.perf_counter()
        with self._outage:
            async with self._turn(), self._writer.begin() as connection:
                yield connection
        _warn_if_slow(name, started)

    async def write(self, name: str, writes: Iterable[Write]) -> None:
        """One transaction of statements that only write rows; they are committed on return. Raises as `writing` does.

        SQLite takes all of them in one trip to its thread. By way of `writing` it would be a trip for each, which for
        thousands of small transactions costs more than what they write.
        """
        wanted, started = [one for one in writes if one.rows], time.perf_counter()
        if self._bulk is None:
            async with self.writing(name) as tx:
                for one in wanted:
                    await tx.exec_driver_sql(one.sql, list(one.rows))
            return
        async with self._turn():
            await self._bulk.write(wanted)
        _warn_if_slow(name, started)

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """SQLite has one writer at a time: queue here, first come first served, instead of in its sleeping retries."""
        if self._one_writer is None:
            yield
            return
        async with self._one_writer:
            yield


def _warn_if_slow(name: str, started: float) -> None:
    if (took_s := time.perf_counter() - started) > _SLOW_S:
        _log.warning("transaction %s took %.1f s", name, took_s)


def _sqlite_engine(url: str) -> AsyncEngine:
    return create_async_engine(url, pool_size=_CONNECTIONS, max_overflow=0)


def _postgresql_engine(url: str) -> AsyncEngine:
    """Connections are tried before use: after the server was restarted, the old ones are dead."""
    limits = {"command_timeout": _COMMAND_S, "timeout": _COMMAND_S, "server_settings": _POSTGRESQL_SETTINGS}
    return create_async_engine(
        url, pool_size=_POSTGRESQL_CONNECTIONS, max_overflow=0, pool_pre_ping=True, connect_args=limits
    )


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run the packaged migrations up to a revision, by default the newest, over an open connection.

    Raises `UnfitDatabase`.
    """
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, to)


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    raw: Any = connection
    raw.isolation_level = None  # this module begins transactions itself: the driver would begin them too late
    cursor = connection.cursor()
    for pragma in PRAGMAS:
        cursor.execute(pragma)
    cursor.close()


def _keep_connection(context: ExceptionContext) -> None:
    """A task that is cancelled in a transaction rolls back on its connection.

    SQLAlchemy would drop the connection instead, and with it leave the write lock to a cursor that is still open.
    """
    if isinstance(context.original_exception, asyncio.CancelledError):
        context.is_disconnect = False


def _begin_sqlite(connection: Connection) -> None:
    """Take the write lock at once where a transaction will write: upgrading a read lock later may deadlock."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
