"""A time by which an HTTP exchange must be over, however busily the other end keeps it alive.

httpx bounds the silence between two reads, not their sum: a byte every few seconds, or interim answers (103) without
end, would hold a client for ever. Here every read and write of a connection ends at the exchange's deadline.

And a peer that is gone without a word (a cable, a VPN leg, a radio cell) is noticed by the kernel: what is under way
and not acknowledged for `stall_s`, or a held-open answer whose other end does not answer probes, ends the connection.
Left to itself, TCP goes on for a quarter of an hour, and finds a line that is back only with its next, ever rarer,
repetition.
"""

import math
import socket
import ssl
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import httpcore
import httpx

from umbel.client.wire.timing import IDLE, Timing

_PIECE_BYTES = 1 << 16
_PROBES = 3  # one may be lost, and one more
_until: ContextVar[float] = ContextVar("umbel_exchange_until", default=math.inf)
_timing: ContextVar[Timing] = ContextVar("umbel_exchange_timing", default=IDLE)


@contextmanager
def exchange_until(until: float) -> Generator[None]:
    """What this thread reads and writes here ends at `until`, on `time.monotonic`'s clock, with httpx's timeouts."""
    token = _until.set(min(until, _until.get()))
    try:
        yield
    finally:
        _until.reset(token)


@contextmanager
def timed_by(timing: Timing) -> Generator[None]:
    """This thread's exchanges take their times from here."""
    token = _timing.set(timing)
    try:
        yield
    finally:
        _timing.reset(token)


def timing() -> Timing:
    """The times of this thread's exchanges."""
    return _timing.get()


def bound(http: httpx.Client) -> httpx.Client:
    """Have this client's connections, those by way of a proxy too, heed `exchange_until`.

    httpx hands no network backend down to httpcore, whose public seam this is; so it is set where httpx keeps it.
    """
    private = cast(Any, http)
    for transport in (private._transport, *private._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            pool = cast(Any, transport)._pool
            pool._network_backend = _Backend(pool._network_backend)
    return http


class _Backend(httpcore.NetworkBackend):
    """The backend it wraps, with streams that keep deadlines."""

    def __init__(self, backend: httpcore.NetworkBackend) -> None:
        self._backend = backend

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(timeout, httpcore.ConnectTimeout)
        return _Stream(self._backend.connect_tcp(host, port, left_s, local_address, socket_options))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    """A connection on which nothing outlasts the exchange."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream
        self._stall_s = 0.0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._notice_stalls(timing().stall_s)
        for start in range(0, len(buffer), _PIECE_BYTES):  # each piece may take its timeout anew
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
    """Have the kernel end a connection whose other end is silent; as far as this system can (Linux: wholly)."""
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
    until = _until.get()
    if math.isinf(until):
        return timeout
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise error("the exchange took too long in all")
    return left_s if timeout is None else min(timeout, left_s)
