"""Leaving politely: the first Ctrl-C or SIGTERM finishes what is worth finishing, the second one leaves at once.

While the client only waits (for work, for a download, before another try) the first is enough.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """Raised in the main thread where waiting is cut short; not an `Exception`, so that nothing swallows it."""


class Shutdown:
    """Whether this client has been asked to leave, and why."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._may_interrupt = False
        self._requested = threading.Event()

    @property
    def reason(self) -> str | None:
        """Why the client should leave, None while it may stay."""
        return self._reason

    def request(self, reason: str) -> None:
        """Ask from any thread: training stops, what is done is sent, and the client leaves."""
        self._reason = reason
        self._requested.set()

    def wait(self, seconds: float) -> None:
        """Sleep, inside `interruptible`: raises `Interrupted` as soon as somebody asks to leave, in whichever way."""
        # A signal raises by itself. It must not set the event: its handler runs in the thread that may hold its lock.
        if self._requested.wait(seconds):
            raise Interrupted(self._reason)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Here the first signal raises `Interrupted`, as does one that came before."""
        self._may_interrupt = True
        try:
            if self._reason is not None:
                raise Interrupted(self._reason)
            yield
        finally:
            self._may_interrupt = False

    @contextmanager
    def on_signals(self) -> Generator[None]:
        """Listen to SIGINT and SIGTERM; only the main thread can, elsewhere this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        is_second = self._reason is not None
        self._reason = f"{signal.Signals(number).name} received"
        if self._may_interrupt or is_second:
            raise Interrupted(self._reason)
