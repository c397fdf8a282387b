"""The coordinator's process: its socket, the lock on its data directory, and its shutdown.

On SIGTERM or SIGINT the process accepts no more connections, answers held-open requests at once, and gives the others a
few seconds. Everything that was answered is stored already.
"""

import asyncio
import errno
import fcntl
import gc
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from umbel.aggregation.kernels.native import NoKernels, chosen
from umbel.server import journal
from umbel.server.blobs.choose import open_blobs
from umbel.server.blobs.files import private_directory, write_private
from umbel.server.clock import SystemClock
from umbel.server.http.connection import Connection
from umbel.server.http.deps import State
from umbel.server.http.limits import ConnectionSlots
from umbel.server.serve.app import create_app
from umbel.server.settings import Settings
from umbel.server.store.database import Database
from umbel.server.store.deployment import Deployment, DeploymentPlaces
from umbel.server.store.keys import AdminKey, AuditKey
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.replicas import require_agreement
from umbel.server.sums.torch_import import import_torch

GRACE_S = 5
_KEEP_ALIVE_S = 75
_GC_OBJECTS = 20_000
"""New objects between two collections of cycles. With Python's 700 a busy coordinator spends a tenth of its time."""


class CannotStart(Exception):
    """A port, the data directory or a database is unavailable. One sentence says which, and what to do."""


def run(settings: Settings, log_level: str, *, adopt: bool = False) -> None:
    """Serve until a signal. `adopt`: see `Deployment`.

    The port and a database server are checked before any file is made. Raises
    `CannotStart`, `UnfitAdminKey`, `UnfitAuditKey`, `UnfitDatabase`, `UnfitDeployment`, `ClockApart`,
    `BlobsUnavailable` and `OSError`.
    """
    journal.begin(log_level)
    try:
        chosen()  # refuse missing kernels now, not when the first round has closed
    except NoKernels as error:
        raise CannotStart(str(error)) from error
    os.umask(0o077)  # other users may not read models, updates and the database
    with closing(_listener(settings.host, settings.port)) as listener:
        asyncio.run(_require_database(settings))
        private_directory(settings.data)
        with _locked(settings.data):
            admin_key = AdminKey.load(settings.admin_key_path)  # an error here is one sentence, not a traceback
            audit_key = AuditKey.load(settings.audit_key_path)
            asyncio.run(_require_fitness(settings, audit_key, admin_key, adopt))
            journal.signs_with(audit_key.public)
            _Server(settings, log_level).run([listener])


def _listener(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet, so that peers are refused instead of left waiting."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise CannotStart(f"cannot find the address {host} ({error.strerror}); choose another --host") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the connections of an earlier process may linger
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise CannotStart(_no_port(host, port, error)) from error
    return listener


def _no_port(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {host} is in use; stop the program that uses it, or choose another --port"
        case errno.EADDRNOTAVAIL:
            return f"this machine has no address {host}; choose another --host"
        case errno.EACCES:
            return f"only root may listen on port {port}; choose a --port of 1024 or more"
        case _:
            return f"cannot listen on port {port} of {host} ({error.strerror}); choose another --port or --host"


async def _require_database(settings: Settings) -> None:
    """Check that the database answers and that its clock agrees with ours. SQLite's file is made later."""
    if settings.database_url is None:
        return
    try:
        database = Database(settings.database)
    except ModuleNotFoundError as error:
        raise CannotStart(
            f"PostgreSQL needs the package {error.name}; install it in a clone of umbel: "
            "pip install -c constraints.txt '.[server,postgres]'"
        ) from error
    except (SQLAlchemyError, ValueError) as error:
        raise CannotStart(_bad_url(error)) from error
    try:
        await require_agreement(database, SystemClock())
    except DatabaseAway as error:
        raise CannotStart(f"the database at {database.place} does not answer: {error}; check database_url") from error
    except (SQLAlchemyError, ValueError, TypeError, OverflowError) as error:  # the driver rejects its options
        raise CannotStart(_bad_url(error)) from error
    finally:
        await database.close()


def _bad_url(error: Exception) -> str:
    why = str(error).splitlines()[0]
    return f"database_url is wrong: {why}; write it as postgresql+asyncpg://USER@HOST:PORT/DATABASE"


async def _require_fitness(settings: Settings, audit_key: AuditKey, admin_key: AdminKey, adopt: bool) -> None:
    """Refuse to start with an unusable store, or with blobs or keys that do not belong to the database.

    Errors here are one sentence; errors when the application starts would be tracebacks.
    """
    blobs = open_blobs(settings)
    await asyncio.to_thread(blobs.prepare)
    database = Database(settings.database)
    try:
        await database.migrate()
        named = DeploymentPlaces(
            blobs=settings.blobs or str(settings.blob_directory),
            audit_key=str(settings.audit_key_path),
            admin_key=str(settings.admin_key_path),
        )
        await Deployment(database, blobs, audit_key.public, admin_key, named).settle(adopt=adopt)
    finally:
        await database.close()


class _Server(uvicorn.Server):
    """uvicorn, which logs its address and answers held-open requests when it stops."""

    def __init__(self, settings: Settings, log_level: str) -> None:
        self._settings = settings
        self._app = create_app(settings)
        slots = ConnectionSlots.of_this_process()
        super().__init__(
            uvicorn.Config(
                self._app,
                log_level=log_level.lower(),
                loop="uvloop",
                ws="none",
                http=partial(Connection, slots=slots),  # type: ignore[arg-type]  # called as the class would be
                backlog=slots.backlog,
                log_config=None,  # the root logger's format
                access_log=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another process listens there now
            raise CannotStart(_no_port(self._settings.host, self._settings.port, error)) from error
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            journal.listening(host)
            url = usable_url(host, port)
            write_private(self._settings.endpoint_path, url + "\n")
            threading.Thread(target=_warm_up, name="umbel-warm-up").start()
            journal.serving(url, self._settings.admin_key_path)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop gracefully, with exit status 0 unlike uvicorn's own; a second Ctrl-C stops at once."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = getattr(self._app.state, "umbel", None)
        if isinstance(state, State):
            state.coordinator.hang_up()
        await super().shutdown(sockets)
        self._settings.endpoint_path.unlink(missing_ok=True)


def _warm_up() -> None:
    """Import what the first folding needs, while requests are answered already."""
    import_torch()
    gc.collect()
    gc.set_threshold(_GC_OBJECTS, 20, 20)
    gc.freeze()  # or each full collection visits all objects of torch and pydantic and stops the process for 0.2 s


def usable_url(host: str, port: int) -> str:
    """The URL at which this machine reaches a socket; an address that means all interfaces becomes loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # compared, not listened on
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _locked(data: Path) -> Generator[None]:
    """Lock the data directory for this process. The lock ends with the process."""
    with (data / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotStart(f"another coordinator uses {data}; stop it first, or choose another --data") from error
        yield
