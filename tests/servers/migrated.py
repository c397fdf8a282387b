"""Databases with the newest tables: the migrations run once in this process, and each test gets a copy.

A coordinator that starts over a copy still runs `Database.migrate`, which finds nothing to do. `test_database.py` and
the tests that start processes let a coordinator migrate an empty database.
"""

import asyncio
import functools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from umbel.server.store.database import Database


def migrate(url: str) -> None:
    """Bring the database up to date. The caller's event loop may be running."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _migrate(url)).result()


def copy_sqlite(to: Path) -> None:
    """Write a SQLite database with the newest tables, unless the file exists."""
    if not to.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(_sqlite())


@functools.cache
def _sqlite() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "umbel.db")
        migrate(f"sqlite+aiosqlite:///{path}")
        return path.read_bytes()


async def _migrate(url: str) -> None:
    database = Database(url)
    try:
        await database.migrate()
    finally:
        await database.close()
