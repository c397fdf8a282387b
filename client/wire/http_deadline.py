"""A deadline for each HTTP exchange, whatever the peer does to keep it alive.

httpx limits the silence between two reads, not their sum: a byte every few seconds, or endless interim answers (103),
would hold a client for ever. Here every read and write ends at the exchange's deadline.

The kernel also notices a peer that disappears (a cable, a VPN, a radio cell): the connection ends if bytes are
unacknowledged for `stall_s`, or if the peer of a held-open answer does not answer probes. By default TCP would try for
a quarter of an hour.
"""

import math
import socket
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import httpcore
import httpx

from umbel.client.wire.timing import IDLE, Timing

T = TypeVar("T")
_PIECE_BYTES = 1 << 16
_PROBES = 3  # two may be lost
_until: ContextVar[float] = ContextVar("umbel_exchange_until", default=math.inf)
_ending: ContextVar[Callable[[], float]] = ContextVar("umbel_exchange_ending", default=lambda: math.inf)
_timing: ContextVar[Timing] = ContextVar("umbel_exchange_timing", default=IDLE)


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Generator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def exchange_until(until: float) -> AbstractContextManager[None]:
    """End this thread's reads and writes at `until`, on `time.monotonic`'s clock, with httpx's timeouts."""
    return _set(_until, min(until, _until.get()))


def ended_by(ends_at: Callable[[], float]) -> AbstractContextManager[None]:
    """As `exchange_until`, with an end that may move: it is asked for at each read and write."""
    return _set(_ending, ends_at)


def timed_by(timing: Timing) -> AbstractContextManager[None]:
    """Use these times for this thread's exchanges."""
    return _set(_timing, timing)


def timing() -> Timing:
    """The times of this thread's exchanges."""
    return _timing.get()


def bound(http: httpx.Client) -> httpx.Client:
    """Make this client's connections, through proxies too, keep the deadline of `exchange_until`.

    A network backend is a public interface of httpcore, but httpx does not pass one on, so it is set in httpx's pool.
    """
    private = cast(Any, http)
    for transport in (private._transport, *private._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            pool = cast(Any, transport)._pool
            pool._network_backend = _Backend(pool._network_backend)
    return http


class _Backend(httpcore.NetworkBackend):
    """Wraps a backend so that its streams keep deadlines."""

    def __init__(self, backend: httpcore.NetworkBackend) -> None:
        self._backend = backend

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *more: Any, **options: Any
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._backend.connect_tcp(host, port, left_s, *more, **options))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    """Wraps a connection so that nothing outlasts the exchange."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream
        self._stall_s = 0.0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._notice_stalls(timing().stall_s)
        for start in range(0, len(buffer), _PIECE_BYTES):  # each piece has its own timeout
            piece = buffer[start : start + _PIECE_BYTES]
            self._stream.write(piece, _left_s(timeout, httpcore.WriteTimeout))

    def _notice_stalls(self, stall_s: float) -> None:
        connection = self._stream.get_extra_info("socket")
        if stall_s != self._stall_s and isinstance(connection, socket.socket):
            set_stall(connection, stall_s)
        self._stall_s = stall_s

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left_s))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def set_stall(connection: socket.socket, stall_s: float) -> None:
    """Make the kernel end a connection with a silent peer, as far as the system supports it (Linux does)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, round(stall_s / _PROBES))
    wanted = {
        "TCP_USER_TIMEOUT": round(1000 * stall_s),
        "TCP_KEEPIDLE": max(1, round(stall_s)),
        "TCP_KEEPINTVL": probe_s,
        "TCP_KEEPCNT": _PROBES,
    }
    for name, value in wanted.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _left_s(timeout: float | None, error: type[httpcore.TimeoutException]) -> float | None:
    """The timeout, cut at the deadline. Raises `error` when that has passed."""
    until = min(_until.get(), _ending.get()())
    if math.isinf(until):
        return timeout
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise error("the request and its answer together took longer than their time limit")
    return left_s if timeout is None else min(timeout, left_s)
