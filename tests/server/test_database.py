"""The migrations make exactly the tables that the code uses."""

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from umbel.server.database import upgrade
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
