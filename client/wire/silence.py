"""How long a coordinator has not answered, and what a client does once that is too long."""

import math
import threading
import time
from collections.abc import Callable


class Silence:
    """It begins with a request that fails, and ends with an answer. Threads may share it."""

    def __init__(self, max_s: float = math.inf, gives_up: Callable[[], None] = lambda: None) -> None:
        """`gives_up`: called once, from another thread, when a silence has lasted for `max_s` seconds.

        Raises `ValueError` for a time that is not above 0.
        """
        if not max_s > 0:
            raise ValueError(f"the seconds after which a client gives up must be above 0, not {max_s}")
        self.max_s = max_s
        self.is_too_long = False
        self.ends_at = math.inf
        """When this silence becomes too long, on `time.monotonic`'s clock; infinity while there is none."""
        self._gives_up = gives_up
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def failed(self) -> None:
        """A request got no answer."""
        with self._lock:
            if self._timer is None and self.max_s <= threading.TIMEOUT_MAX:
                self.ends_at = time.monotonic() + self.max_s
                self._timer = threading.Timer(self.max_s, self._end)
                self._timer.daemon = True
                self._timer.start()

    def answered(self) -> None:
        """The coordinator has answered, be it with a refusal."""
        with self._lock:
            if self._timer is not None and not self.is_too_long:
                self._timer.cancel()
                self._timer, self.ends_at = None, math.inf

    def _end(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():
                return  # an answer came at the last moment
            self.is_too_long = True
        self._gives_up()
