"""How long a coordinator has given no usable answer, and what a client does once that is too long.

An answer is usable once its whole body has been read, and if the request need not be repeated. So a refusal with a
reason is usable. A 429, a 5xx, a proxy's page and an endless body are not. A model may take hours to arrive, so bytes
of a body defer the end of a silence, at the slowest useful rate (`timing.SLOWEST_BYTES_PER_S`).
"""

import math
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from umbel.client.wire.timing import SLOWEST_BYTES_PER_S


class Silence:
    """It begins with a request that fails, and ends with a usable answer. Threads may share it."""

    def __init__(self, max_s: float = math.inf, gives_up: Callable[[], None] = lambda: None) -> None:
        """`gives_up`: called once, from another thread, when a silence has lasted for `max_s` seconds.

        Raises `ValueError` for a time that is not above 0.
        """
        if not max_s > 0:
            raise ValueError(f"the seconds after which a client gives up must be above 0, not {max_s}")
        self.max_s = max_s
        self.is_too_long = False
        self.ends_at = math.inf
        """When this silence becomes too long, on `time.monotonic`'s clock; infinity while requests succeed."""
        self.cause = ""
        """Why the last request of this silence got no usable answer."""
        self._gives_up = gives_up
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def failed(self, cause: str) -> None:
        """A request got no usable answer."""
        with self._lock:
            if self.is_too_long:
                return  # what fails from now on was ended by this client
            self.cause = cause
            if self._timer is None and self.max_s <= threading.TIMEOUT_MAX:
                self.ends_at = time.monotonic() + self.max_s
                self._start_timer(self.max_s)

    def received(self, n_bytes: int) -> None:
        """A part of an answer's body has come. It defers the end by its time at the slowest useful rate, to `max_s`
        seconds from now at most.
        """
        with self._lock:
            if self._timer is not None:
                latest = time.monotonic() + self.max_s
                self.ends_at = min(self.ends_at + n_bytes / SLOWEST_BYTES_PER_S, latest)

    def answered(self) -> None:
        """The coordinator has given a usable answer."""
        with self._lock:
            if self._timer is not None and not self.is_too_long:
                self._timer.cancel()
                self._timer, self.ends_at, self.cause = None, math.inf, ""

    def _start_timer(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # an answer came at the last moment
            left_s = self.ends_at - time.monotonic()
            self.is_too_long = left_s <= 0
            if not self.is_too_long:  # parts of an answer have come since
                self._start_timer(left_s)
        if self.is_too_long:
            self._gives_up()


class TimedBody(httpx.SyncByteStream):
    """A body whose parts defer the end of `silence`. A silence begins if they fall `slack_s` behind the slowest useful
    rate.
    """

    def __init__(self, body: httpx.SyncByteStream, silence: Silence, slack_s: float) -> None:
        self._body, self._silence, self._slack_s = body, silence, slack_s

    def __iter__(self) -> Iterator[bytes]:
        due_at = time.monotonic() + self._slack_s
        for piece in self._body:
            now = time.monotonic()
            due_at = min(due_at + len(piece) / SLOWEST_BYTES_PER_S, now + self._slack_s)
            if now > due_at:
                self._silence.failed(
                    f"its answer comes too slowly, at less than {SLOWEST_BYTES_PER_S:g} bytes a second"
                )
            self._silence.received(len(piece))
            yield piece

    def close(self) -> None:
        self._body.close()
