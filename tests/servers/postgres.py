"""A real PostgreSQL server for tests: Debian's binaries, a cluster of its own, and new databases in it."""

import asyncio
import getpass
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

from tests.servers.migrated import migrate

_COUNTER = itertools.count()
_IN_MEMORY = Path("/dev/shm")
_IN_MEMORY_MIN_BYTES = 4 << 30  # a database takes 8 MB
_OPTIONS = {
    "listen_addresses": "''",
    "max_connections": 100,
    # What dies in tests is a process, never the machine: what the kernel was given is kept.
    "fsync": "off",
    "full_page_writes": "off",
    # It would visit hundreds of databases that live for a second.
    "autovacuum": "off",
}


def binaries() -> Path | None:
    """Where `initdb` and `postgres` are: the newest version installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


class Cluster:
    """A running server that listens on a Unix socket only."""

    def __init__(self, directory: Path, user: str, control: list[str], options: list[str]) -> None:
        self.directory = directory
        self.user = user
        self._control = control
        self._options = options
        self._template: str | None = None

    def start(self) -> None:
        _run([*self._control, *self._options, "start"])

    def stop(self, mode: str = "immediate") -> None:
        """`immediate`: as a crash does."""
        _run([*self._control, "-m", mode, "stop"])

    def restart(self) -> None:
        """Hang up on every client, as a server does that fails over, and come back."""
        _run([*self._control, *self._options, "-m", "fast", "restart"])

    def new_database(self) -> str:
        """A database with the newest tables and no rows; its SQLAlchemy URL."""
        if self._template is None:
            url = self.empty_database()
            migrate(url)
            self._template = _name_in(url)
        return self._create(f" TEMPLATE {self._template}")

    def empty_database(self) -> str:
        """A database without tables; its SQLAlchemy URL."""
        return self._create("")

    def drop(self, url: str) -> None:
        """Remove a database, whoever is connected to it."""
        self._execute(f"DROP DATABASE {_name_in(url)} WITH (FORCE)")

    def _create(self, options: str) -> str:
        name = f"umbel_{os.getpid()}_{next(_COUNTER)}"
        self._execute(f"CREATE DATABASE {name}{options}")
        return f"postgresql+asyncpg://{self.user}@/{name}?host={self.directory}"

    def _execute(self, statement: str) -> None:
        with ThreadPoolExecutor(1) as thread:  # the caller's event loop may be running
            thread.submit(asyncio.run, self._execute_once(statement)).result()

    async def _execute_once(self, statement: str) -> None:
        connection = await asyncpg.connect(user=self.user, database="postgres", host=str(self.directory))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


def _name_in(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


@contextmanager
def cluster() -> Generator[Cluster]:
    """Make a cluster, start it, and remove it at the end. PostgreSQL does not run as root, so root asks `postgres`."""
    folder = binaries()
    assert folder is not None, "install PostgreSQL: apt-get install postgresql"
    is_root = os.geteuid() == 0
    prefix = ["runuser", "-u", "postgres", "--"] if is_root else []
    user = "postgres" if is_root else getpass.getuser()
    directory = Path(tempfile.mkdtemp(prefix="umbel-pg-", dir=_place()))
    if is_root:
        shutil.chown(directory, "postgres")
    try:
        data = directory / "data"
        _run([*prefix, str(folder / "initdb"), "-D", str(data), "-U", user, "-A", "trust", "-E", "UTF8"])
        options = " ".join([f"-k {directory}", *(f"-c {name}={value}" for name, value in _OPTIONS.items())])
        control = [*prefix, str(folder / "pg_ctl"), "-D", str(data), "-w"]
        server = Cluster(directory, user, control, ["-l", str(directory / "log"), "-o", options])
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _place() -> Path:
    """Memory, where there is plenty of it, else the disk. A socket's path must be short, so not pytest's folders."""
    try:
        return _IN_MEMORY if shutil.disk_usage(_IN_MEMORY).free >= _IN_MEMORY_MIN_BYTES else Path("/tmp")
    except OSError:
        return Path("/tmp")


def dump(url: str) -> bytes:
    """Every row of every table of a database, by its SQLAlchemy URL: text as text, bytes as they are."""
    with ThreadPoolExecutor(1) as thread:  # the caller's event loop may be running
        return thread.submit(asyncio.run, _dump(url.replace("+asyncpg", ""))).result()


async def _dump(url: str) -> bytes:
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        values = [
            value
            for (table,) in sorted(map(tuple, tables))
            for row in await connection.fetch(f'SELECT * FROM "{table}"')
            for value in (table, *row.values())
        ]
    finally:
        await connection.close()
    return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for value in values)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
