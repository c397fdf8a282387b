"""A thread that knows which runs are open to this client: it asks the coordinator, which answers when that changes."""

import logging
import random
import threading
from collections.abc import Mapping

from umbel.aggregation.messages import WAIT_S_MAX, OpenRun, OpenRuns
from umbel.aggregation.types import RunId
from umbel.client.errors import AccessRefused, CertificateRefused, ClientError, CoordinatorRefused
from umbel.client.rounds.shutdown import Interrupted
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.timing import RETRY_AFTER_MAX_S, Backoff
from umbel.client.wire.transport import Patience, patiently

RUNS_MAX = 1000  # of one coordinator; the rest, by name, is not looked at
PAUSE_S = 1.0  # the shortest time between two requests, so that a coordinator which does not wait causes no flood
TROUBLE = Backoff(first_s=5.0, longest_s=300.0)
_jitter = random.SystemRandom().random
log = logging.getLogger("umbel.client")


class RunsWatch:
    """The newest list of open runs. `runs`: by name; None before the first answer. `failed`: why the thread ended."""

    def __init__(self, coordinator: CoordinatorClient) -> None:
        self.runs: Mapping[RunId, OpenRun] | None = None
        self.failed: ClientError | None = None
        self._coordinator = coordinator
        self._ended = threading.Event()
        self._mark = ""
        self._has_warned = False  # of a list that is cut
        self._failures = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="open runs", daemon=True).start()

    def stop(self) -> None:
        """End the thread. It is not joined, because its last request may be held open."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                pause_s = patiently(self._ask, Patience(wait=self._wait))
                self._failures = 0
            except Interrupted:
                return
            except ClientError as error:
                trouble_s = self._pause_after(error)
                if trouble_s is None:
                    return
                pause_s = trouble_s
            except Exception as error:  # a bug must not keep the agent from all later runs
                if self._ended.is_set():
                    return  # httpx raises after the client was closed
                log.error("asking for the open runs failed; trying again", exc_info=error)
                self._failures += 1
                pause_s = TROUBLE.bound_s(self._failures)
            self._ended.wait(pause_s)

    def _ask(self) -> float:
        """Ask once; returns the time until the next request, in seconds."""
        first = self._coordinator.open_runs(mark=self._mark, wait_s=WAIT_S_MAX if self._mark else 0.0)
        if first.mark != self._mark or self.runs is None:
            self.runs = {run.name: run for run in self._all_of(first)}
            self._mark = first.mark
        return max(PAUSE_S, min(first.retry_after_s, RETRY_AFTER_MAX_S)) * (0.5 + _jitter())

    def _all_of(self, first: OpenRuns) -> list[OpenRun]:
        """The runs of the first page and of those that follow."""
        runs, page = [*first.runs], first
        while page.next and page.runs and len(runs) < RUNS_MAX:
            page = self._coordinator.open_runs(after=page.next)
            runs += page.runs
        if page.next and not self._has_warned:
            self._has_warned = True
            log.warning("the coordinator lists more than %d open runs; this agent looks at the first ones", RUNS_MAX)
        return runs[:RUNS_MAX]

    def _pause_after(self, error: ClientError) -> float | None:
        """How long to wait after an error that no quick retry mends; None if a person must act first."""
        if isinstance(error, CoordinatorRefused) and error.status == 404 and self.runs is None:
            error = ClientError(
                "this coordinator does not list its runs, because its version of umbel is older than the agent's: ask "
                "the operator to update it, or start umbel join for each run"
            )
        elif not isinstance(error, AccessRefused) and (self.runs is not None or not _is_final(error)):
            self._failures += 1
            if self._failures == 1:
                log.warning("cannot see the open runs: %s; trying again", error)
            return TROUBLE.bound_s(self._failures)
        self.failed = error
        return None

    def _wait(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise Interrupted("the agent ends")


def _is_final(error: ClientError) -> bool:
    return isinstance(error, CoordinatorRefused | CertificateRefused)
