"""A thread that tells the coordinator why this site does not come to runs that are open to it, for their operator.

It only informs: whatever goes wrong with it, the site's work continues.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from umbel.aggregation.types import RunId
from umbel.client.errors import ClientError
from umbel.client.rounds.shutdown import Interrupted
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Patience, patiently

PAUSE_S = 1.0  # between two requests: the coordinator chooses how many runs it lists
AGAIN_S = 6.0  # between two looks at the news: a coordinator keeps one word of a client in five seconds
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class Absence:
    """Why the site does not come to a run, in words that the coordinator may see. `may_come`: it may still come."""

    reason: str
    may_come: bool


class AbsenceTeller:
    """Tells each absence once, until it changes."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self._coordinator = coordinator
        self._absences: Mapping[RunId, Absence] = {}
        self._told: dict[RunId, Absence] = {}
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
        if absences != self._absences:
            self._absences = absences
            self._news.set()

    def _run(self) -> None:
        while self._news.wait() and not self._ended.is_set():
            self._news.clear()
            try:
                self._tell_news()
            except Interrupted:
                return
            self._ended.wait(AGAIN_S)

    def _tell_news(self) -> None:
        absences = self._absences
        self._told = {run: told for run, told in self._told.items() if absences.get(run) == told}
        for run, absence in absences.items():
            if run not in self._told:
                self._tell(run, absence)
                self._told[run] = absence
                self._wait(PAUSE_S)

    def _tell(self, run: RunId, absence: Absence) -> None:
        send = partial(self._coordinator.not_coming, run, absence.reason, may_come=absence.may_come)
        try:
            patiently(send, Patience(wait=self._wait))
        except Interrupted:
            raise
        except ClientError as error:  # the run is over, or the coordinator's version of umbel is older than this one
            log.debug("run %s: the coordinator was not told why this site does not come: %s", run, error)
        except Exception as error:  # a bug here must not end the thread
            if not self._ended.is_set():  # httpx raises after the client was closed
                log.error("run %s: telling why this site does not come failed", run, exc_info=error)

    def _wait(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise Interrupted("the agent ends")
