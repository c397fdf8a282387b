"""The migrations make exactly the tables that the code uses; a transaction that is cut short leaves no lock."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, delete, event, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from tests.federations.server_device import house, run_file, small_state
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S, until
from umbel.aggregation.types import RunId
from umbel.server.store import tables
from umbel.server.store.database import Database, Prepared, UnfitDatabase, Write, opened, upgrade
from umbel.server.store.tables import Base


def test_the_migrations_make_the_tables(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'umbel.db'}")
    with engine.connect() as connection:
        upgrade(connection)
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_migrating_twice_is_the_same(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'umbel.db'}")
    for _ in range(2):
        with engine.connect() as connection:
            upgrade(connection)
            connection.commit()
    engine.dispose()


def test_a_database_with_one_key_under_two_names_is_not_migrated_and_the_sentence_names_them(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'umbel.db'}")
    with engine.connect() as connection:
        upgrade(connection, "1")
        row = {"labels": "{}", "bound_labels": "{}", "is_name_bound": False, "enrolled_at": 0.0, "last_heard_at": 0.0}
        names = {"north": (b"n", None), "twin": (b"n", None), "south": (b"s", None), "gone": (b"s", 1.0)}
        for name, (key, revoked_at) in names.items():
            client = {"id": name, "public_key": key * 32, "revoked_at": revoked_at, **row}
            connection.execute(insert(tables.ClientRow).values(client))
        with pytest.raises(UnfitDatabase, match=r"'north' and 'twin'; .*umbel client remove") as refused:
            upgrade(connection)
        assert "south" not in str(refused.value)
        connection.execute(update(tables.ClientRow).where(tables.ClientRow.id == "twin").values(revoked_at=2.0))
        upgrade(connection)
    engine.dispose()


def test_a_database_that_a_newer_version_has_opened_is_refused(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'umbel.db'}")
    with engine.connect() as connection:
        upgrade(connection)
        connection.execute(text("UPDATE alembic_version SET version_num = '999'"))
        with pytest.raises(UnfitDatabase, match="schema 999: a newer version"):
            upgrade(connection)
    engine.dispose()


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "umbel.db"
    path.write_bytes(b"no database" * 500)

    async def scenario() -> None:
        database = Database(f"sqlite+aiosqlite:///{path}")
        try:
            with pytest.raises(UnfitDatabase, match="not a SQLite database"):
                await database.migrate()
        finally:
            await database.close()

    asyncio.run(scenario())
    assert path.read_bytes() == b"no database" * 500


@pytest.mark.usefixtures("any_database")
def test_a_database_of_the_first_tables_is_brought_up_to_date_and_keeps_its_rows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            settings = it.settings
            await it.begin(run_file(), small_state())
            created = (await it.progress())["run"]
        await _as_of_the_first_tables(settings.database)
        async with house(tmp_path, database_url=settings.database_url) as it:
            assert (await it.progress())["run"] == created
            assert await it.state.services.member_lists.of(RunId("demo")) is None

    asyncio.run(scenario())


async def _as_of_the_first_tables(url: str) -> None:
    """Take back all that migrations after the first have made."""
    database = Database(url)
    async with database.writing("test") as tx:
        await tx.execute(text("DROP TABLE member_lists"))
        await tx.execute(text("ALTER TABLE turned_away DROP COLUMN kind"))
        for index in ("ix_clients_public_key", "ix_model_versions_sha256", "ix_assignments_client"):
            await tx.execute(text(f"DROP INDEX {index}"))
        await tx.execute(text("UPDATE alembic_version SET version_num = '1'"))
    await database.close()


_TOKENS = insert(tables.TokenRow)
_COLUMNS = ("sha256", "created_at", "expires_at", "labels")
_SYNCED = {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 10_000, "foreign_keys": 1}


def _tokens(database: Database, *names: str) -> Write:
    return Prepared(_TOKENS, database.dialect, _COLUMNS).of((name, 0.0, 1e12, "{}") for name in names)


async def _stored(database: Database) -> set[str]:
    async with database.reading() as tx:
        return set(await tx.scalars(select(tables.TokenRow.sha256)))


@pytest.mark.usefixtures("any_database")
def test_rows_that_are_written_together_are_there_on_return_or_none_of_them_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            database: Database = it.state.services.waiters._db
            await database.write("test", [_tokens(database, "a", "b"), _tokens(database), _tokens(database, "c")])
            assert await _stored(database) == {"a", "b", "c"}
            with pytest.raises(IntegrityError):
                await database.write("test", [_tokens(database, "d"), _tokens(database, "e", "a")])
            assert await _stored(database) == {"a", "b", "c"}
            async with asyncio.timeout(LIMIT_S), database.writing("test") as tx:  # nothing is locked
                await tx.execute(delete(tables.TokenRow).where(tables.TokenRow.sha256 == "b"))
            await database.write("test", [_tokens(database, "d")])
            assert await _stored(database) == {"a", "c", "d"}

    asyncio.run(scenario())


def test_sqlite_syncs_every_commit_to_disk_on_whichever_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'umbel.db'}")
        await database.migrate()
        async with database.reading() as tx:
            found = {name: (await tx.execute(text(f"PRAGMA {name}"))).scalar_one() for name in _SYNCED}
        assert found == _SYNCED
        await database.close()

    asyncio.run(scenario())
    with closing(opened(str(tmp_path / "umbel.db"))) as connection:
        assert {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _SYNCED} == _SYNCED


def test_a_coordinator_takes_ten_connections_to_postgresql_at_once_and_no_more(postgresql: Cluster) -> None:
    """docs/how-to/add-replicas.md promises it, and operators set `max_connections` by it."""
    n_connections, url = 10, postgresql.new_database()
    # PostgreSQL's own workers look into a database too, now and then.
    ours = "datname = current_database() AND backend_type = 'client backend'"
    connected = text(f"SELECT count(*) FROM pg_stat_activity WHERE {ours}")

    async def scenario() -> set[int]:
        database, at_once = Database(url), asyncio.Barrier(n_connections)

        async def look() -> int:
            async with database.reading() as tx:
                await at_once.wait()
                return int((await tx.execute(connected)).scalar_one())

        found = await asyncio.gather(*(look() for _ in range(2 * n_connections)))
        await database.close()
        return set(found)

    assert asyncio.run(scenario()) == {n_connections}


@pytest.mark.slow
def test_rows_whose_writing_is_cancelled_are_all_there_or_none_and_nothing_stays_locked(tmp_path: Path) -> None:
    async def scenario() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'umbel.db'}")
        await database.migrate()
        for moment in range(100):
            pair = {f"{moment}.a", f"{moment}.b"}
            task = asyncio.create_task(database.write("test", [_tokens(database, one) for one in sorted(pair)]))
            await asyncio.sleep(moment / 50_000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(LIMIT_S):
                await database.write("test", [_tokens(database, f"next-{moment}")])
            assert len(await _stored(database) & pair) in (0, 2)
        assert {f"next-{moment}" for moment in range(100)} <= await _stored(database)
        await database.close()

    asyncio.run(scenario())


INSERT = "INSERT INTO tokens (sha256, created_at, expires_at, labels) VALUES (hold('b'), 0, 0, '{}')"


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT hold(sha256) FROM tokens",
        f"{INSERT} RETURNING sha256",
        INSERT,
    ],
    ids=["reads", "writes and reads", "writes"],
)
def test_a_write_that_is_cancelled_leaves_no_lock_behind(statement: str, tmp_path: Path) -> None:
    """While a statement is at work in its thread, which goes on: another write follows, and finds nothing of it."""
    has_begun, goes_on = threading.Event(), threading.Event()

    def hold(value: str) -> str:
        has_begun.set()
        goes_on.wait(LIMIT_S)
        return value

    async def scenario() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'umbel.db'}")
        event.listen(database._engine.sync_engine, "connect", partial(_add_function, hold))  # pyright: ignore[reportPrivateUsage]
        await database.migrate()

        async def write(name: str, *more: str) -> None:
            async with database.writing("test") as tx:
                row = {"sha256": name, "created_at": 0.0, "expires_at": 0.0, "labels": "{}"}
                await tx.execute(insert(tables.TokenRow).values(row))
                for one in more:
                    await tx.execute(text(one))

        cancelled = asyncio.create_task(write("cancelled", statement))
        await until("a statement that is at work", lambda: has_begun.is_set() or cancelled.done())
        cancelled.cancel()
        await asyncio.sleep(0)  # it has heard of that
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await write("next")  # SQLite would wait for ten seconds, then give up
        async with database.reading() as tx:
            assert (await tx.scalars(text("SELECT sha256 FROM tokens"))).all() == ["next"]
        await database.close()

    asyncio.run(scenario())


def _add_function(hold: Callable[[str], str], connection: Any, _: object) -> None:
    connection.run_async(lambda raw: raw.create_function("hold", 1, hold))
