"""One connection: uvicorn's HTTP/1.1, for peers that take their time, or never end what they began.

uvicorn times a connection only between a response and the next request, so anyone could hold one, and with it a file
descriptor, for nothing. Here a peer that owes something gets a deadline; one that waits for our answer does not.
"""

import asyncio
import logging
import resource
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from umbel.server.problems import problem_response

_log = logging.getLogger(__name__)

HEAD_S = 10.0
"""A request's head is whole this long after the connection was made, or after its own first byte."""
PROGRESS_S = 30.0
"""In each such time a peer sends `PROGRESS_BYTES` of its body, or takes as much of our answer."""
PROGRESS_BYTES = 4096
CONNECTIONS_MAX = 10_000
_OTHER_FILES = 64
_CONNECTIONS_MIN = 16
_READ_BYTES = 1 << 14
_COMPLAIN_S = 60.0


@dataclass(slots=True)
class Door:
    """How many connections are taken: the process must never run out of file descriptors."""

    connections_max: int
    _turned_away: int = field(default=0, init=False)
    _complained_at: float = field(default=float("-inf"), init=False)

    @classmethod
    def of_this_process(cls) -> "Door":
        """Allow this process all files that it may have. Raises `OSError` where they are too few."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 4 * CONNECTIONS_MAX
        files = max(soft, wanted if hard == resource.RLIM_INFINITY else min(hard, wanted))
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        # A connection may have a file open, and some are accepted before they can be turned away.
        room = (files - _OTHER_FILES) // 3
        if room < _CONNECTIONS_MIN:
            raise OSError(f"{files} open files are too few for a coordinator; raise the limit (ulimit -n)")
        return cls(min(room, CONNECTIONS_MAX))

    @property
    def backlog(self) -> int:
        """How many connections asyncio may accept at once: it does so up to four times before it asks us."""
        return max(4, min(2048, self.connections_max // 4))

    def is_full(self, connections: int) -> bool:
        """Whether one of so many connections must go. Says so in the log, but not each time."""
        if connections <= self.connections_max:
            return False
        self._turned_away += 1
        if (now := time.monotonic()) - self._complained_at > _COMPLAIN_S:
            self._complained_at = now
            _log.warning("all %d connections are taken; %d turned away so far", self.connections_max, self._turned_away)
        return True


class _Owed(Enum):
    """What a peer must send next. Nothing, between requests and while it waits for an answer."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class Connection(H11Protocol):
    """uvicorn's protocol with deadlines, a door, and problem documents for what is no HTTP."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        door: Door,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._door = door
        self._owed = _Owed.NOTHING
        self._received = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio's 256 KiB a read, buffered for each of many uploads, would be the coordinator's largest use of memory.
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's selector transports
        transport.set_write_buffer_limits(0)  # so that a peer that does not read is seen at once, in `pause_writing`
        if self._door.is_full(len(self.connections)):
            transport.abort()
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it after an error

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer:
            self._write_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close. `msg` is uvicorn's, and says no more."""
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True  # whatever the application answers to the request, this stands
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = problem_response("malformed-http", "send HTTP/1.1 as RFC 9112 has it", {"Connection": "close"})
            head = h11.Response(status_code=answer.status_code, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        """Start the deadline of what the peer owes now, unless it runs already."""
        owed = self._owed_now()
        if owed is self._owed:
            return
        self._owed = owed
        if self._read_timer:
            self._read_timer.cancel()
        if owed is _Owed.HEAD:
            self._read_timer = self.loop.call_later(HEAD_S, self.transport.abort)
        elif owed is _Owed.BODY:
            self._expect_body()

    def _owed_now(self) -> _Owed:
        if self.transport.is_closing():
            return _Owed.NOTHING
        if self.conn.their_state is h11.SEND_BODY:
            return _Owed.BODY
        if self.conn.their_state is h11.IDLE and (not self.cycle or self.conn.trailing_data[0]):
            return _Owed.HEAD
        return _Owed.NOTHING

    def _expect_body(self) -> None:
        before = self._received

        def check() -> None:
            # Nothing comes while we do not read, or have not asked for the body (100 Continue).
            is_ours = self.flow.read_paused or self.cycle.waiting_for_100_continue
            if is_ours or self._received - before >= PROGRESS_BYTES:
                self._expect_body()
            else:
                self.transport.abort()

        self._read_timer = self.loop.call_later(PROGRESS_S, check)

    def _expect_reading(self) -> None:
        before = self.transport.get_write_buffer_size()

        def check() -> None:
            if before - self.transport.get_write_buffer_size() >= PROGRESS_BYTES:
                self._expect_reading()
            else:
                self.transport.abort()

        if self._write_timer:
            self._write_timer.cancel()
        self._write_timer = self.loop.call_later(PROGRESS_S, check)
