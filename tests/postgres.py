"""A real PostgreSQL server for tests: Debian's binaries, a cluster of its own, a fresh database for whoever asks."""

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

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

_COUNTER = itertools.count()


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

    def start(self) -> None:
        _run([*self._control, *self._options, "start"])

    def stop(self, mode: str = "immediate") -> None:
        """`immediate`: as a crash does."""
        _run([*self._control, "-m", mode, "stop"])

    def restart(self) -> None:
        """Hang up on every client, as a server does that fails over, and come back."""
        _run([*self._control, *self._options, "-m", "fast", "restart"])

    def new_database(self) -> str:
        """An empty database; its SQLAlchemy URL."""
        name = f"umbel_{os.getpid()}_{next(_COUNTER)}"
        with ThreadPoolExecutor(1) as thread:  # the caller's event loop may be running
            thread.submit(asyncio.run, self._create(name)).result()
        return f"postgresql+asyncpg://{self.user}@/{name}?host={self.directory}"

    async def _create(self, name: str) -> None:
        connection = await asyncpg.connect(user=self.user, database="postgres", host=str(self.directory))
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()


@contextmanager
def cluster() -> Generator[Cluster]:
    """Make a cluster, start it, and remove it at the end. PostgreSQL does not run as root, so root asks `postgres`."""
    folder = binaries()
    assert folder is not None, "install PostgreSQL: apt-get install postgresql"
    is_root = os.geteuid() == 0
    prefix = ["runuser", "-u", "postgres", "--"] if is_root else []
    user = "postgres" if is_root else getpass.getuser()
    directory = Path(tempfile.mkdtemp(prefix="umbel-pg-", dir="/tmp"))  # a socket's path must be short
    if is_root:
        shutil.chown(directory, "postgres")
    try:
        data = directory / "data"
        _run([*prefix, str(folder / "initdb"), "-D", str(data), "-U", user, "-A", "trust", "-E", "UTF8"])
        # No fsync: what dies in tests is a process, never the machine.
        options = f"-k {directory} -c listen_addresses='' -c max_connections=100 -c fsync=off"
        control = [*prefix, str(folder / "pg_ctl"), "-D", str(data), "-w"]
        server = Cluster(directory, user, control, ["-l", str(directory / "log"), "-o", options])
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


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
