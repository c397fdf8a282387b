"""Watch an assignment while a site trains: stay visible to the coordinator, and learn when the round has closed."""

import logging
import random
import threading
from types import TracebackType
from typing import Self

from umbel.aggregation.messages import WAIT_S_MAX, AssignmentState
from umbel.aggregation.types import AssignmentId
from umbel.client.errors import AssignmentClosed, ClientError, TryAgain
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.http_deadline import timed_by
from umbel.client.wire.timing import within

# Shorter trainings cost no request. It delays news of the round's close by as much.
START_AFTER_S = 0.5
PAUSE_S = 0.1  # between polls, if a coordinator does not hold them open
_jitter = random.SystemRandom().random  # the process-wide generator belongs to the training
log = logging.getLogger("umbel.client")


def renewal_s(window_s: float) -> float:
    """How long one long poll is held: the coordinator hears from each client every max(1 s, window / 20)."""
    return min(0.8 * max(1.0, window_s / 20), WAIT_S_MAX)


class Watch:
    """A background thread that long-polls an assignment, from half a second after the start until the exit.

    The thread is not joined, because its last poll may be held open; it ends by itself.
    """

    start_after_s = START_AFTER_S
    pause_s = PAUSE_S

    def __init__(self, coordinator: CoordinatorClient, assignment: AssignmentId, window_s: float) -> None:
        self._coordinator = coordinator
        self._assignment = assignment
        self._window_s = window_s
        self._ended = threading.Event()
        self._closed: str | None = None
        self._given_up: Exception | None = None

    @property
    def closed(self) -> str | None:
        """Why the round closed; None while it is open."""
        return self._closed

    @property
    def ended(self) -> str | None:
        """Why training should end; None while it should not."""
        return self._closed

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name=f"watch {self._assignment}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _run(self) -> None:
        timing, pause_s, failures = within(self._window_s), self.start_after_s, 0
        while self._closed is None and not self._ended.wait(pause_s):
            try:
                with timed_by(timing):
                    self._poll()
                pause_s, failures = self.pause_s, 0
            except TryAgain as error:
                failures += not error.has_other
                pause_s = timing.backoff.wait_s(failures, _jitter(), error.retry_after_s) if failures else 0.0
            except AssignmentClosed as error:
                self._closed = error.detail
            except (ClientError, RuntimeError) as error:  # RuntimeError: httpx raises it after the client was closed
                log.debug("stopped watching %s: %s", self._assignment, error)
                self._given_up = error
                return

    def _poll(self) -> None:
        status = self._coordinator.status(self._assignment, renewal_s(self._window_s))
        if status.state is AssignmentState.CLOSED:
            self._closed = status.reason
