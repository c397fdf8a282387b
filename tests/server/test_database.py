"""The migrations make exactly the tables that the code uses; a transaction that is cut short leaves no lock."""

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, insert, text, update

from tests.server_device import house, run_file, small_state
from umbel.aggregation.types import RunId
from umbel.server import tables
from umbel.server.database import Database, UnfitDatabase, upgrade
from umbel.server.tables import Base


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
            connection.execute(insert(tables.Client).values(client))
        with pytest.raises(UnfitDatabase, match=r"'north' and 'twin'; .*umbel client remove") as refused:
            upgrade(connection)
        assert "south" not in str(refused.value)
        connection.execute(update(tables.Client).where(tables.Client.id == "twin").values(revoked_at=2.0))
        upgrade(connection)
    engine.dispose()


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
        for index in ("ix_clients_public_key", "ix_model_versions_sha256", "ix_assignments_client"):
            await tx.execute(text(f"DROP INDEX {index}"))
        await tx.execute(text("UPDATE alembic_version SET version_num = '1'"))
    await database.close()


@pytest.mark.slow
def test_a_write_that_is_cancelled_leaves_no_lock_behind(tmp_path: Path) -> None:
    """At whatever moment: ten microseconds later each time, over the whole of a transaction."""

    async def scenario() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'umbel.db'}")
        await database.migrate()

        async def write(name: str) -> None:
            async with database.writing("test") as tx:
                for part in range(3):
                    row = {"sha256": f"{name}.{part}", "created_at": 0.0, "expires_at": 0.0, "labels": "{}"}
                    await tx.execute(insert(tables.Token).values(row))

        for moment in range(300):
            task = asyncio.create_task(write(f"cancelled-{moment}"))
            await asyncio.sleep(moment / 100_000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(5.0):  # SQLite would wait for ten seconds, then give up
                await write(f"next-{moment}")
        await database.close()

    asyncio.run(scenario())
