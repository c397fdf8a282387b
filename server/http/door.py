"""How many connections a process takes, and who must go when all places are taken.

The process must never run out of file descriptors. Whoever holds a place without a claim to it (a stranger in the
middle of a request that does not come) must not keep out who has something to say: the newcomer gets a place, and the
connection with the least claim goes, the oldest first.
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
_FILES_EACH = 3  # a connection may have a file open, and some are accepted before they can be turned away
FILES_WANTED = 4 * CONNECTIONS_MAX
_HOW = "ulimit -Hn, or LimitNOFILE= of a systemd unit"
_CONNECTIONS_MIN = 16
_COMPLAIN_S = 60.0

SCOPE_KEY = "umbel.connection"
_log = logging.getLogger(__name__)


class Claim(IntEnum):
    """Why a connection may stay; the least goes first."""

    STRANGER = 0
    """Never sent a request that was signed or had the admin key, whatever it waits for."""
    IDLE = 1
    """Known, and between requests: its client will come back on another connection."""
    OWES = 2
    """Owes a head or a body, and is known."""
    ANSWERED = 3
    """Known, and its request is being worked on, or held open: it never goes."""


class Guest(Protocol):
    """A connection, as the door sees it."""

    def abort(self) -> None: ...

    def become_known(self) -> None: ...


def vouch_for(scope: Scope) -> None:
    """The request of this scope is of a client, or of an operator: its connection is not the first to go."""
    if (guest := scope.get(SCOPE_KEY)) is not None:  # None where there is no socket
        guest.become_known()


def _places() -> dict[Claim, dict[Guest, None]]:
    return {claim: {} for claim in Claim}


@dataclass(slots=True)
class Door:
    """Lets connections in, up to `connections_max`; which are there, by claim, each in the order in which it came."""

    connections_max: int
    _places: dict[Claim, dict[Guest, None]] = field(default_factory=_places, init=False)
    _claims: dict[Guest, Claim] = field(default_factory=dict["Guest", Claim], init=False)
    _sent_away: int = field(default=0, init=False)
    _complained_at: float = field(default=float("-inf"), init=False)

    @classmethod
    def of_this_process(cls) -> "Door":
        """Allow this process the files that it needs, as far as it may. Raises `OSError` where they are too few."""
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
        """How many connections may wait to be accepted: a loop may take all of them before it asks us."""
        return max(4, min(_BACKLOG_MAX, self.connections_max // 4))

    def enter(self, guest: Guest) -> bool:
        """Give a new connection a place, if need be that of another; False, and it is hung up on, if none may go."""
        if len(self._claims) >= self.connections_max and not self._make_room():
            guest.abort()
            return False
        self._claims[guest] = Claim.STRANGER
        self._places[Claim.STRANGER][guest] = None
        return True

    def note(self, guest: Guest, claim: Claim) -> None:
        """A connection's claim is this from now on."""
        before = self._claims.get(guest)
        if before is None or before is claim:
            return
        del self._places[before][guest]
        self._places[claim][guest] = None
        self._claims[guest] = claim

    def leave(self, guest: Guest) -> None:
        """A connection is closed, or soon will be."""
        if (claim := self._claims.pop(guest, None)) is not None:
            del self._places[claim][guest]

    def _make_room(self) -> bool:
        self._complain()
        for claim in (Claim.STRANGER, Claim.IDLE, Claim.OWES):
            for guest in self._places[claim]:
                self.leave(guest)
                guest.abort()
                return True
        return False

    def _complain(self) -> None:
        """Say so in the log, but not each time."""
        self._sent_away += 1
        if (now := time.monotonic()) - self._complained_at > _COMPLAIN_S:
            self._complained_at = now
            _log.warning("all %d connections are taken; %d sent away so far", self.connections_max, self._sent_away)
