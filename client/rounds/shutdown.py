"""Leave on a signal: the first Ctrl-C or SIGTERM finishes the work at hand, the second one leaves at once.

While the client only waits (for work, for a download, before a retry) the first is enough.

A client that is withdrawn leaves at once, too, and sends nothing more.
"""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """Raised in the main thread to end a wait; not an `Exception`, so that nothing swallows it."""


class Shutdown:
    """Whether this client has been asked to leave, and why."""

    def __init__(self) -> None:
        self.is_withdrawn = False  # whether the site no longer allows what its client does
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

    def withdraw(self, reason: str) -> None:
        """From another thread: `Interrupted` is raised in the main thread, inside `on_signals`, whatever it does."""
        self.is_withdrawn = True
        self._reason = reason
        os.kill(os.getpid(), signal.SIGTERM)  # a signal also ends a wait for an answer

    def require_allowed(self) -> None:
        """Raise `Interrupted` if the client was withdrawn."""
        if self.is_withdrawn:
            raise Interrupted(self._reason)

    @contextmanager
    def require_allowed_after(self) -> Generator[None]:
        """Raise `Interrupted` at the end of this block if the client was withdrawn, even if the block raised another
        error: the site's own code may catch the first `Interrupted`, and it may raise an error of its own instead.

        The gate (`withdrawal.py`) alone is not enough. A decline passes the gate, and its reason may tell how
        the work went. In a secure round, the client would wait for other clients' shares, remember a sum that its
        update is not in, and leave without declining.
        """
        try:
            yield
        finally:
            self.require_allowed()

    def wait(self, seconds: float) -> None:
        """Sleep, inside `interruptible`. A signal or `request` ends it with `Interrupted`."""
        # The signal handler raises by itself. It must not set the event: its thread may hold the event's lock.
        if self._requested.wait(seconds):
            raise Interrupted(self._reason)

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """In this block the first signal, or one that came before, raises `Interrupted`."""
        self._may_interrupt = True
        try:
            if self._reason is not None:
                raise Interrupted(self._reason)
            yield
        finally:
            self._may_interrupt = False

    @contextmanager
    def on_signals(self) -> Generator[None]:
        """Handle SIGINT and SIGTERM. Only the main thread can; elsewhere this does nothing."""
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
        if not self.is_withdrawn:
            self._reason = f"{signal.Signals(number).name} received"
        if self._may_interrupt or is_second:
            raise Interrupted(self._reason)
