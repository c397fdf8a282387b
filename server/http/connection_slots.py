"""How many connections a process accepts, and which one it closes for a new one when all slots are taken.

The process must never run out of file descriptors. A connection that was never verified must not keep out a client. So
a new connection always gets a slot, and the connection with the lowest priority is closed, the oldest first.
"""

import logging
import resource
import time
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from starlette.types import Scope

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
            raise OSError(f"{files} open files are too few for a coordinator; raise the hard limit ({_HOW})")
        if room < CONNECTIONS_MAX:
            _log.warning(
                "at most %d connections at a time, not %d: this process may open only %d files; raise the hard limit "
                "to %d (%s)",
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
            _log.warning("all %d connections are taken; closed %d so far", self.connections_max, self._n_closed)
