"""What a peer may take: the bytes of a body, and a connection.

A body must declare its length (411), within the cap of its address (413), and have exactly that length. The middleware
checks the declared length first, then the bytes that come.

The process must never run out of file descriptors. A connection that was never verified must not keep out a client. So
a new connection always gets a slot, and the connection with the lowest priority is closed, the oldest first.
"""

import logging
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umbel.aggregation.trust.members import FILE_BYTES_MAX
from umbel.server.problems import Refused, refusal
from umbel.server.settings import Settings

RUN_FILE_BYTES_MAX = 16 << 10  # reading TOML takes time with the square of its length
RUN_BYTES_MAX = 2 * (RUN_FILE_BYTES_MAX + FILE_BYTES_MAX)  # with its member list, in JSON, where \n is two bytes
REPORT_BYTES_MAX = 64 << 10  # 4,096 counts are up to 60 KB; the audit bundle keeps a report as it was signed
SECURE_BYTES_MAX = 64 << 10  # shares for three hundred neighbours are 34 KB
_LENGTH = re.compile(r"\d{1,15}")
CONNECTIONS_MAX = 10_000
_BACKLOG_MAX = 2048
_OTHER_FILES = 64
_FILES_EACH = 3  # a connection may have a file open, and some are accepted before they can be closed
FILES_WANTED = 4 * CONNECTIONS_MAX
_HOW = "ulimit -Hn, or LimitNOFILE= of a systemd unit"
_CONNECTIONS_MIN = 16
_WARN_EVERY_S = 60.0
SCOPE_KEY = "umbel.connection"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cap:
    """At addresses that match `path`, a body holds at most `bytes_max`."""

    path: re.Pattern[str]
    bytes_max: int


def caps_of(settings: Settings) -> tuple[Cap, ...]:
    """The caps in order: the first whose path matches applies. The last is for control messages."""
    return (
        Cap(re.compile(r"/v1/assignments/[^/]+/update"), settings.chunk_bytes_max),
        Cap(re.compile(r"/v1/assignments/[^/]+/(?:report|evaluation)"), min(REPORT_BYTES_MAX, settings.json_bytes_max)),
        Cap(re.compile(r"/v1/assignments/[^/]+/secure/[^/]+"), SECURE_BYTES_MAX),
        Cap(re.compile(r"/v1/admin/models/[^/]+"), settings.model_bytes_max),
        Cap(re.compile(r"/v1/admin/runs/[^/]+"), RUN_BYTES_MAX),
        Cap(re.compile(r".*", re.DOTALL), settings.json_bytes_max),
    )


def cap_at(path: str, caps: Sequence[Cap]) -> Cap:
    """The cap that applies to a path."""
    return next((cap for cap in caps[:-1] if cap.path.fullmatch(path)), caps[-1])  # the last is for all the rest


class BodyLimits:
    """The middleware. It raises refusals of a body where the body is read, and they are answered there."""

    def __init__(self, app: ASGIApp, caps: Sequence[Cap]) -> None:
        self._app = app
        self._caps = caps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            declared = self._declared(scope)
        except Refused as refused:
            # The body stays unread, so the connection cannot be used again.
            response = refusal(scope, refused.kind, refused.detail, {"Connection": "close"})
            await response(scope, receive, send)
            return
        await self._app(scope, _counted(receive, declared), send)

    def _declared(self, scope: Scope) -> int:
        if "\x00" in scope["path"]:  # PostgreSQL raises an error for it
            raise Refused("malformed-request", "the address contains a NUL character")
        text = "0"
        for name, value in scope["headers"]:
            if name == b"transfer-encoding":
                raise Refused("length-required", "the body was sent chunked; send it with Content-Length")
            if name == b"content-length":
                text = value.decode("latin-1")
        if not _LENGTH.fullmatch(text):
            raise Refused("malformed-request", "Content-Length is not a number of bytes")
        cap = cap_at(scope["path"], self._caps)
        if int(text) > cap.bytes_max:
            raise Refused(
                "body-too-large", f"the body has {int(text)} bytes; this address accepts at most {cap.bytes_max}"
            )
        return int(text)


def _counted(receive: Receive, declared: int) -> Receive:
    """`receive`, but a body longer or shorter than declared is refused."""
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] != "http.request":
            return message
        received += len(message.get("body", b""))
        if received > declared or (received < declared and not message.get("more_body", False)):
            raise Refused("lying-length", f"Content-Length says {declared} bytes, but {received} bytes arrived")
        return message

    return counted


class Priority(IntEnum):
    """The lowest is closed first."""

    UNVERIFIED = 0
    """Never sent a request that was signed or had the admin key."""
    IDLE = 1
    """Verified, and between requests: its client will come back on another connection."""
    SENDING = 2
    """Verified, and must still send a head or a body."""
    ANSWERING = 3
    """Verified, and its request is being worked on or held open. It is never closed."""


class Closable(Protocol):
    """What the slots need of a connection."""

    def abort(self) -> None: ...

    def mark_verified(self) -> None: ...


def mark_verified(scope: Scope) -> None:
    """Mark the connection of a request as verified, so that it is not closed before unverified ones."""
    if (connection := scope.get(SCOPE_KEY)) is not None:  # None where there is no socket
        connection.mark_verified()


def _by_priority() -> dict[Priority, dict[Closable, None]]:
    return {priority: {} for priority in Priority}


@dataclass(slots=True)
class ConnectionSlots:
    """The open connections, at most `connections_max`, by priority; each priority's are in the order of entry."""

    connections_max: int
    _by_priority: dict[Priority, dict[Closable, None]] = field(default_factory=_by_priority, init=False)
    _priorities: dict[Closable, Priority] = field(default_factory=dict["Closable", Priority], init=False)
    _n_closed: int = field(default=0, init=False)
    _warned_at: float = field(default=float("-inf"), init=False)

    @classmethod
    def of_this_process(cls) -> "ConnectionSlots":
        """Raise the limit of open files as far as allowed. Raises `OSError` if it is too low for a coordinator."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = max(soft, FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        room = min((files - _OTHER_FILES) // _FILES_EACH, CONNECTIONS_MAX)
        if room < _CONNECTIONS_MIN:
            raise OSError(
                f"this process may open only {files} files, too few for a coordinator; raise its hard limit of open "
                f"files ({_HOW})"
            )
        if room < CONNECTIONS_MAX:
            _log.warning(
                "at most %d connections at a time, not %d: this process may open only %d files; raise its hard "
                "limit of open files to %d (%s)",
                room,
                CONNECTIONS_MAX,
                files,
                FILES_WANTED,
                _HOW,
            )
        return cls(room)

    @property
    def backlog(self) -> int:
        """How many connections may wait to be accepted: an event loop may accept all of them before it calls us."""
        return max(4, min(_BACKLOG_MAX, self.connections_max // 4))

    def add(self, connection: Closable) -> bool:
        """Give a new connection a slot, if necessary that of another. False if none is free: then it is closed."""
        if len(self._priorities) >= self.connections_max and not self._close_one():
            connection.abort()
            return False
        self._priorities[connection] = Priority.UNVERIFIED
        self._by_priority[Priority.UNVERIFIED][connection] = None
        return True

    def set_priority(self, connection: Closable, priority: Priority) -> None:
        before = self._priorities.get(connection)
        if before is None or before is priority:
            return
        del self._by_priority[before][connection]
        self._by_priority[priority][connection] = None
        self._priorities[connection] = priority

    def remove(self, connection: Closable) -> None:
        """Free the slot of a connection that is closed, or soon will be."""
        if (priority := self._priorities.pop(connection, None)) is not None:
            del self._by_priority[priority][connection]

    def _close_one(self) -> bool:
        self._warn()
        for priority in (Priority.UNVERIFIED, Priority.IDLE, Priority.SENDING):
            for connection in self._by_priority[priority]:
                self.remove(connection)
                connection.abort()
                return True
        return False

    def _warn(self) -> None:
        """Log that connections are closed, at most once a minute."""
        self._n_closed += 1
        if (now := time.monotonic()) - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            _log.warning(
                "all %d connections are taken; closed %d so far to make room for new ones",
                self.connections_max,
                self._n_closed,
            )
