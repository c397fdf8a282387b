"""Threads beside a training and the encoding of its update.

They keep the client visible to the coordinator, and learn when the round has closed.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from umbel.aggregation.messages import WAIT_S_MAX, AssignmentState
from umbel.aggregation.round.silence import cut_s
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.messages import Roster
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import AssignmentId
from umbel.client.errors import AssignmentClosed, ClientError, OutOfTime, TryAgain, alarm_of
from umbel.client.rounds.shutdown import Interrupted
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.http_deadline import timed_by
from umbel.client.wire.timing import Timing, within

START_AFTER_S = 0.5  # shorter trainings cost no request
PAUSE_S = 0.1  # from the beginning of a poll to that of the next, if a coordinator does not hold polls open
_TRIES_BEFORE_SILENCE = 4
_jitter = random.SystemRandom().random  # the process-wide generator belongs to the training
log = logging.getLogger("umbel.client")


def renewal_s(window_s: float) -> float:
    """How long one long poll is held: the coordinator hears from each client every max(1 s, window / 20)."""
    return min(0.8 * max(1.0, window_s / 20), WAIT_S_MAX)


def _timing(window_s: float) -> Timing:
    """The times of a poll. A client whose poll was cut off tries several times before it counts as silent."""
    timing = within(window_s)
    longest_s = min(timing.backoff.longest_s, cut_s(window_s) / _TRIES_BEFORE_SILENCE)
    return replace(timing, backoff=replace(timing.backoff, longest_s=longest_s))


class Watch:
    """A background thread that long-polls an assignment. It is not joined, because its last poll may be held open."""

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
    def ended(self) -> str | None:
        """Why training should end; None while it should not."""
        return self._closed

    def check(self) -> None:
        """Raise `AssignmentClosed` if the round has closed."""
        if self._closed is not None:
            raise AssignmentClosed("assignment-closed", self._closed, 200)

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name=f"watch {self._assignment}", daemon=True).start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        timing, pause_s, failures = _timing(self._window_s), self.start_after_s, 0
        while self._closed is None and not self._ended.wait(pause_s):
            began = time.monotonic()
            try:
                with timed_by(timing):
                    self._poll()
                # No pause after a held poll: a client that dies without an open one is missed later (decision 20).
                pause_s, failures = max(self.pause_s - (time.monotonic() - began), 0.0), 0
            except TryAgain as error:
                failures += not error.has_other
                pause_s = timing.backoff.wait_s(failures, _jitter(), error.retry_after_s) if failures else 0.0
            except AssignmentClosed as error:
                self._closed = error.detail
            except Interrupted as error:  # the site no longer allows the run, so nothing more is sent
                self._closed = str(error)
            except (ClientError, RuntimeError) as error:  # RuntimeError: httpx raises it after the client was closed
                log.debug("stopped watching %s: %s", self._assignment, error)
                self._given_up = error
                return

    def _poll(self) -> None:
        status = self._coordinator.status(self._assignment, renewal_s(self._window_s))
        if status.state is AssignmentState.CLOSED:
            self._closed = status.reason


class KeyExchange(Watch):
    """A background thread that exchanges the keys of a secure round until the inbox arrives, and then watches.

    ```
    PUT advertise-keys -> GET share-keys (roster) -> PUT share-keys -> GET masked-input (inbox) -> status, to the end
    ```

    Each request is one poll, repeated with the same bytes until it is answered. The first error ends the exchange, and
    with it the training. `check_roster` raises `ClientError` for a roster that the site refuses. Once `wait` has
    returned, only the caller uses the client.
    """

    start_after_s = 0.0  # other clients wait for these keys

    def __init__(
        self,
        coordinator: CoordinatorClient,
        assignment: AssignmentId,
        window_s: float,
        client: SecureClient,
        check_roster: Callable[[Roster], None],
    ) -> None:
        super().__init__(coordinator, assignment, window_s)
        self._client = client
        self._check_roster = check_roster
        self._n_cohort = len(client.context.cohort)
        self._hold_s = renewal_s(window_s)
        self._next = self._advertise
        self._has_inbox = False
        self._is_abandoned = False
        self._is_settled = threading.Event()

    @property
    def ended(self) -> str | None:
        # Once the inbox has arrived, only the watch can fail, which does not matter.
        has_failed = self._given_up is not None and not self._has_inbox
        return self._closed or ("the secure round has failed" if has_failed else None)

    def __exit__(self, *raised: object) -> None:
        self._is_abandoned = any(raised)
        super().__exit__(*raised)

    def wait(self, seconds: float) -> None:
        """Wait for the inbox. Raises the error that ended the exchange, or `OutOfTime`."""
        is_settled = self._is_settled.wait(seconds)
        self.check()
        if not self._has_inbox:
            what = "the exchange of keys has failed" if is_settled else "other clients' shares did not arrive in time"
            raise OutOfTime(f"{what}; this client can take part in the next attempt") from self._given_up

    def check(self) -> None:
        """Raise the error that ended the exchange, if any."""
        super().check()
        if not self._has_inbox and isinstance(self._given_up, ClientError):
            raise self._given_up

    def _run(self) -> None:
        try:
            super()._run()
        except SecAggError as error:
            self._given_up = alarm_of(error)
        finally:
            if self._is_abandoned or not self._has_inbox:
                self._client.abort()
            self._is_settled.set()

    def _poll(self) -> None:
        self._next()

    def _advertise(self) -> None:
        self._send(Phase.ADVERTISE_KEYS, self._client.advertise())
        self._continue_with(self._fetch_roster)

    def _fetch_roster(self) -> None:
        roster = self._receive(Phase.SHARE_KEYS)
        if roster is not None:
            self._check_roster(Roster.decode(roster, self._n_cohort))
            self._continue_with(self._share_by(roster))

    def _share_by(self, roster: bytes) -> Callable[[], None]:
        message = self._client.share(roster)

        def share() -> None:
            self._send(Phase.SHARE_KEYS, message)
            self._continue_with(self._fetch_inbox)

        return share

    def _fetch_inbox(self) -> None:
        inbox = self._receive(Phase.MASKED_INPUT)
        if inbox is not None:
            self._client.hear(inbox)
            self._has_inbox = True
            self._next = super()._poll
            self._is_settled.set()

    def _continue_with(self, following: Callable[[], None]) -> None:
        """Do the next step at once."""
        self._next, self.pause_s = following, 0.0

    def _send(self, phase: Phase, message: bytes) -> None:
        self._coordinator.send_message(self._assignment, phase, message)

    def _receive(self, phase: Phase) -> bytes | None:
        self.pause_s = PAUSE_S
        return self._coordinator.fetch_message(self._assignment, phase, self._n_cohort, self._hold_s)
