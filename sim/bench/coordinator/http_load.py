"""Many simulated devices from one thread: scripts that send raw HTTP/1.1 requests over keep-alive sockets.

A script is a generator: it yields the bytes of a request and is sent its `RawAnswer`, or yields an `Until`. Scripts
that are ready queue for an idle connection, so ten thousand devices do not need ten thousand sockets. Only what the
measurement needs is parsed, because the load must cost a fraction of what the server does.
"""

import heapq
import selectors
import socket
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias
from urllib.parse import urlsplit

_READ_BYTES = 1 << 16
_LENGTH = b"\r\ncontent-length: "


@dataclass(frozen=True, slots=True)
class Until:
    """Nothing to send before this time, in `time.perf_counter()`; a request that follows at once is due then."""

    at: float


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One response. `body`: without the head; `took_s`: from the request's being due to the answer's last byte."""

    status: int
    body: bytes
    took_s: float


Script: TypeAlias = Generator["bytes | Until", RawAnswer, None]


class LoadFailed(Exception):
    """The server hung up, or did not answer; the message says on what."""


@dataclass(slots=True)
class Tally:
    """What a load has seen. `latencies_s`: one for each answer, in order of arrival."""

    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    statuses: Counter[int] = field(default_factory=Counter[int])
    first_refusal: bytes = b""
    began_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.ended_at - self.began_at

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies_s) / self.wall_s

    def quantile_ms(self, q: float) -> float:
        """A quantile of the latencies, in milliseconds."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    def require_all(self, status: int) -> None:
        """Raise `LoadFailed` unless every answer had this status."""
        if set(self.statuses) - {status}:
            raise LoadFailed(f"not every answer was {status}: {dict(self.statuses)}, such as {self.first_refusal!r}")

    def note(self, answer: RawAnswer) -> None:
        self.latencies_s.append(answer.took_s)
        self.statuses[answer.status] += 1
        if answer.status >= 300 and not self.first_refusal:
            self.first_refusal = answer.body[:500]


@dataclass(slots=True)
class _Link:
    """One connection. `script`: whose request is on its way; `received`: what has come of the answer."""

    socket: socket.socket
    script: Script | None = None
    due_at: float = 0.0
    unsent: bytes = b""
    received: bytes = b""


class Load:
    """Connections to one server. Close it, or use it in a `with` statement."""

    def __init__(self, url: str, n_connections: int) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._selector = selectors.DefaultSelector()
        self._links = [self._connect() for _ in range(n_connections)]
        self._idle = deque(self._links)
        self._ready: deque[tuple[Script, bytes, float]] = deque()
        self._paused: list[tuple[float, int, Script]] = []
        self._order = count()

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_raised: object) -> None:
        for link in self._links:
            link.socket.close()
        self._selector.close()

    def _connect(self) -> _Link:
        link = _Link(socket.create_connection(self._address, timeout=30.0))
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket.setblocking(False)
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        return link

    def run(
        self, scripts: Iterable[Script], is_over: Callable[[], bool] = lambda: False, stall_s: float = 60.0
    ) -> Tally:
        """Run all scripts to their ends, or until `is_over()`; then what was sent is waited for.

        An endless iterable is taken from as connections become idle. Raises `LoadFailed` if nothing moves for
        `stall_s`.
        """
        tally, fresh = Tally(), iter(scripts)
        while self._work_left(fresh, is_over):
            timeout_s = stall_s
            if self._paused:
                timeout_s = max(0.0, min(stall_s, self._paused[0][0] - time.perf_counter()))
            events = self._selector.select(timeout_s)
            if not events and timeout_s == stall_s and (n_owed := len(self._links) - len(self._idle)):
                raise LoadFailed(f"no answer for {stall_s:.0f} s, {n_owed} are owed")
            for key, _ in events:
                self._attend(key.data, tally)
        tally.ended_at = time.perf_counter()
        return tally

    def _work_left(self, fresh: Iterator[Script], is_over: Callable[[], bool]) -> bool:
        """Send what can be sent; whether anything is still to come."""
        now = time.perf_counter()
        if is_over():
            self._ready.clear()
            self._paused.clear()
            return len(self._idle) < len(self._links)
        while self._paused and self._paused[0][0] <= now:
            due_at, _, script = heapq.heappop(self._paused)
            self._step(script, None, due_at)
        while self._idle:
            if self._ready:
                script, request, due_at = self._ready.popleft()
                self._send(self._idle.popleft(), script, request, due_at)
            elif (script_or_none := next(fresh, None)) is not None:
                self._step(script_or_none, None, now)
            else:
                break
        return bool(self._paused or self._ready) or len(self._idle) < len(self._links)

    def _step(self, script: Script, answer: RawAnswer | None, due_at: float) -> None:
        """Let a script go on, and queue what it wants next."""
        try:
            wanted = next(script) if answer is None else script.send(answer)
        except StopIteration:
            return
        if isinstance(wanted, Until):
            heapq.heappush(self._paused, (wanted.at, next(self._order), script))
        else:
            self._ready.append((script, wanted, due_at))

    def _send(self, link: _Link, script: Script, request: bytes, due_at: float) -> None:
        link.script, link.due_at, link.received = script, due_at, b""
        sent = link.socket.send(request)
        link.unsent = request[sent:]
        if link.unsent:
            self._selector.modify(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _attend(self, link: _Link, tally: Tally) -> None:
        if link.unsent:
            link.unsent = link.unsent[link.socket.send(link.unsent) :]
            if not link.unsent:
                self._selector.modify(link.socket, selectors.EVENT_READ, link)
            return
        piece = link.socket.recv(_READ_BYTES)
        if not piece or link.script is None:
            raise LoadFailed(f"the server hung up after {link.received[:200]!r}")
        link.received = link.received + piece if link.received else piece
        if (parsed := _parse(link.received)) is None:
            return
        now = time.perf_counter()
        answer = RawAnswer(*parsed, now - link.due_at)
        tally.note(answer)
        script, link.script = link.script, None
        self._idle.append(link)
        self._step(script, answer, now)


def _parse(received: bytes) -> tuple[int, bytes] | None:
    """Status and body of a whole response with a Content-Length, or None while it is not whole."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return None
    at = head.lower().find(_LENGTH)
    length = 0 if at < 0 else int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])
    return (int(head[9:12]), body) if len(body) >= length else None
