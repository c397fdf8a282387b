"""One HTTP/1.1 connection: uvicorn's protocol with deadlines and limits against slow and hostile peers.

uvicorn limits the time of a connection only between a response and the next request. So any peer could hold a
connection, and with it a file descriptor, for ever. Here a peer that must send something has a deadline. A peer that
waits for our answer has none. When all slots are taken, `ConnectionSlots` closes the one with the lowest priority.

llhttp, uvicorn's parser, refuses what smuggles requests past a proxy: two lengths, a length beside a transfer coding, a
coding that does not end in `chunked`, a bare line feed, white space before a colon. It caps no sizes and asks for no
`Host`; this class does both. Why it is needed: docs/decisions/0018-own-connections.md.
"""

import asyncio
from collections.abc import MutableMapping
from enum import Enum
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from umbel.server.http.limits import SCOPE_KEY, ConnectionSlots, Priority
from umbel.server.problems import problem_response

HEAD_S = 10.0
"""A request's head must be complete this long after the connection was made, or after its own first byte."""
PROGRESS_S = 30.0
"""In each such period a peer must send `PROGRESS_BYTES` of its body, or read as much of our answer."""
PROGRESS_BYTES = 4096
HEAD_BYTES_MAX = 16 << 10
HEADERS_MAX = 100
_READ_BYTES = 16 << 10
_CONTINUE = b"HTTP/1.1 100 "
# Data are copied from it at once, so one buffer serves all connections of a process.
_read_buffer = memoryview(bytearray(_READ_BYTES))


class _Reading(Enum):
    """The part of a request that the parser is reading."""

    BETWEEN = "between requests"
    HEAD = "head"
    BODY = "body"


class _Owed(Enum):
    """What a peer must send next: nothing between requests, and while it waits for an answer."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class _Malformed(Exception):
    """Raised in a parser's callback; the parser ends the request with it."""


class HeadWithBody:
    """Writes a response's head together with the first piece of its body: one packet instead of two."""

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return  # the peer has gone
        if self._head is None or data.startswith(_CONTINUE):
            self._transport.write(data)
        elif not self._head:
            self._head = data
        else:
            head, self._head = self._head, None
            self._transport.write(head + data)

    def flush(self) -> None:
        """Send a head whose response has no body."""
        if self._head:
            head, self._head = self._head, None
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's protocol with deadlines, caps, slots, and problem documents for malformed HTTP.

    Buffered, because a loop's own reads of up to 256 KiB, kept for each of many uploads, would be the coordinator's
    largest use of memory.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        slots: ConnectionSlots,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._is_verified = False
        self._slots = slots
        self._owed = _Owed.NOTHING
        self._reading = _Reading.BETWEEN
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._n_hosts = 0
        self._received = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # --- the transport's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # a peer that does not read is noticed at once, in `pause_writing`
        if self._slots.add(self):
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._slots.remove(self)
        for timer in (self._read_timer, self._write_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it after an error

    def get_buffer(self, sizehint: int) -> memoryview:
        return _read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(_read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        is_of_a_body = self._reading is _Reading.BODY
        super().data_received(data)
        if self._reading is _Reading.HEAD and not is_of_a_body:
            self._unfinished_bytes += len(data)  # the parser keeps a field until it is whole
            if self._unfinished_bytes > HEAD_BYTES_MAX:
                self.send_400_response("")
        if not self.transport.is_closing():
            self._watch()

    def mark_verified(self) -> None:
        """A request on this connection was signed, or had the admin key."""
        self._is_verified = True
        self._slots.set_priority(self, self._priority(self._owed_now()))

    def abort(self) -> None:
        """Close without an answer."""
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The newest request, None before the first."""
        return self.cycle

    # --- the parser's side --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = _Reading.HEAD
        self._head_bytes = self._unfinished_bytes = self._n_hosts = 0
        scope: MutableMapping[str, Any] = self.scope  # type: ignore[assignment]  # uvicorn's type knows no more keys
        scope[SCOPE_KEY] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not _Reading.HEAD:
            return  # trailers: the request was routed and verified without them
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_BYTES_MAX or len(self.headers) >= HEADERS_MAX:
            raise _Malformed
        super().on_header(name, value)
        self._n_hosts += self.headers[-1][0] == b"host"

    def on_headers_complete(self) -> None:
        assert self.parser is not None, "it calls this"
        version = self.parser.get_http_version()  # also 0.9 and 2.0, which llhttp reads as if they were these
        if version not in ("1.0", "1.1") or (self._n_hosts != 1 and (self._n_hosts or version != "1.0")):
            raise _Malformed
        if not self.url.startswith(b"/") or b"#" in self.url or len(self.url) > HEAD_BYTES_MAX:
            raise _Malformed  # what is signed, and what a proxy routes by, is the path as sent
        self._reading = _Reading.BODY
        super().on_headers_complete()
        writer = HeadWithBody(self.transport)
        self.cycle.transport = writer  # type: ignore[assignment]  # it has what a cycle uses of a transport
        self.cycle.on_response = partial(self._end_response, writer)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading = _Reading.BETWEEN

    def _end_response(self, writer: "HeadWithBody") -> None:
        writer.flush()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a problem document, and close. `msg`: uvicorn's own text, unused."""
        newest = self._newest
        is_answering = newest is not None and newest.response_started and not newest.response_complete
        for cycle in (newest, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True  # the application's own answer is discarded
                cycle.message_event.set()
        if not is_answering:
            answer = problem_response(
                "malformed-http", "these bytes are not a valid HTTP/1.1 request (RFC 9112)", {"Connection": "close"}
            )
            fields = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
            self.transport.write(STATUS_LINE[answer.status_code] + fields + b"\r\n" + bytes(answer.body))
        self.transport.close()

    # --- deadlines ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the deadline of what the peer must send now, unless it runs already."""
        owed = self._owed_now()
        self._slots.set_priority(self, self._priority(owed))
        if owed is self._owed:
            return
        self._owed = owed
        if self._read_timer:
            self._read_timer.cancel()
            self._read_timer = None
        if owed is _Owed.HEAD:
            self._read_timer = self.loop.call_later(HEAD_S, self.transport.abort)
        elif owed is _Owed.BODY:
            self._expect_body()

    def _owed_now(self) -> _Owed:
        if self._reading is _Reading.BODY:
            return _Owed.BODY
        is_answered = self._newest is None or self._newest.response_complete
        if is_answered and (self._reading is _Reading.HEAD or self.timeout_keep_alive_task is None):
            return _Owed.HEAD  # without uvicorn's timer something has come, if only line breaks
        return _Owed.NOTHING

    def _priority(self, owed: _Owed) -> Priority:
        if not self._is_verified:
            return Priority.UNVERIFIED  # also while it is answered: it need not read the answer
        if owed is not _Owed.NOTHING:
            return Priority.SENDING
        return Priority.IDLE if self.cycle.response_complete else Priority.ANSWERING

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
