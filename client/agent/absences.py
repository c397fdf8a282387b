"""A thread that tells the coordinator why this site does not come to runs that are open to it, for their operator.

It only informs: whatever goes wrong with it, the site's work continues.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from umbel.aggregation.types import RunId
from umbel.client.errors import ClientError
from umbel.client.rounds.shutdown import Interrupted
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Patience, patiently

PAUSE_S = 1.0  # between two requests: the coordinator chooses how many runs it lists
AGAIN_S = 6.0  # between two looks at the news: a coordinator stores at most one statement of a client in five seconds
REPEAT_S = 12 * 3600.0  # a coordinator keeps a statement for a day
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class Absence:
    """Why the site does not come to a run, in words that the coordinator may see. `may_come`: it may still come."""

    reason: str
    may_come: bool


class AbsenceTeller:
    """Tells each absence when it begins or changes, and twice a day."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()  # for these two
        self._absences: Mapping[RunId, Absence] = {}
        self._untold: set[RunId] = set()
        self._news = threading.Event()
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="absences", daemon=True).start()

    def stop(self) -> None:
        """End the thread. It is not joined, because it may wait for an answer."""
        self._ended.set()
        self._news.set()

    def take(self, absences: Mapping[RunId, Absence]) -> None:
        """From now on these are the runs that the site does not come to."""
        with self._lock:
            changed = {run for run, absence in absences.items() if self._absences.get(run) != absence}
            self._untold = (self._untold | changed) & absences.keys()
            self._absences = absences
        if changed:
            self._news.set()

    def _run(self) -> None:
        repeat_at = time.monotonic() + REPEAT_S
        while not self._ended.is_set():
            self._news.wait(max(0.0, repeat_at - time.monotonic()))
            self._news.clear()
            if time.monotonic() >= repeat_at:  # also if other runs have news all the time
                repeat_at = time.monotonic() + REPEAT_S
                with self._lock:
                    self._untold = {*self._absences}
            try:
                self._tell_news()
            except Interrupted:
                return
            self._ended.wait(AGAIN_S)

    def _tell_news(self) -> None:
        for run in sorted(self._untold):
            self._tell(run)
            self._wait(PAUSE_S)

    def _tell(self, run: RunId) -> None:
        try:
            patiently(lambda: self._send(run), Patience(wait=self._wait))
        except Interrupted:
            raise
        except ClientError as error:  # the run is over, or the coordinator's version of umbel is older than this one
            log.debug("run %s: the coordinator was not told why this site does not come: %s", run, error)
        except Exception as error:  # a bug here must not end the thread
            if not self._ended.is_set():  # httpx raises after the client was closed
                log.error("run %s: telling why this site does not come failed", run, exc_info=error)

    def _send(self, run: RunId) -> None:
        """Tell the absence as it is now: the coordinator may have been away for long."""
        with self._lock:
            absence = self._absences.get(run)
            self._untold.discard(run)
        if absence is not None:
            self._coordinator.not_coming(run, absence.reason, may_come=absence.may_come)

    def _wait(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise Interrupted("the agent ends")
