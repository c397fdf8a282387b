"""Send a client's work: the update, then the report. Count the reports. Or decline."""

import logging
import time
from dataclasses import replace

from umbel.aggregation.messages import AssignmentState, Outcome, ReportAnswer
from umbel.aggregation.types import AssignmentId
from umbel.client.errors import AssignmentClosed, ClientError
from umbel.client.state.store import PendingReport, Store
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.offers import WINDOW_S_MAX
from umbel.client.wire.timing import Bandwidth
from umbel.client.wire.transport import Patience, patiently
from umbel.client.wire.upload import Upload

log = logging.getLogger("umbel.client")


class Delivery:
    """Sends updates and reports from one client's disk to its coordinator, and counts the reports."""

    def __init__(self, coordinator: CoordinatorClient, store: Store) -> None:
        self.bandwidth = Bandwidth()  # the measured bandwidth
        self.reports = 0
        self.accepted = 0  # reports that the coordinator accepted at once; it may have abandoned their rounds since
        self.masked = 0  # reports of secure rounds
        self.masked_evaluations = 0  # those of them that have no update
        self.begun: AssignmentId | None = None  # the newest one of whose work a part may have left this site
        self.opened = 0  # masked reports in sums that this client revealed shares for
        self._coordinator = coordinator
        self._store = store

    def deliver(self, pending: PendingReport, window_s: float, patience: Patience, resume: bool) -> None:
        """Upload, report, and forget the work once the report is answered: the coordinator has stored it then."""
        self.upload(pending.assignment, pending.update_bytes, pending.work.update_sha256, window_s, patience, resume)
        # After a resumed upload the measured rate is too high: a part had arrived before.
        work = replace(pending.work, upload_bytes_per_s=None if resume else self.bandwidth.up)
        self._store.keep_waiting()
        answer = patiently(lambda: self._coordinator.report(pending.assignment, work), patience)
        self._store.forget_work()
        self.note(pending.assignment, answer, pending.work.steps_done, pending.work.steps_planned)

    def upload(
        self,
        assignment: AssignmentId,
        n_bytes: int,
        sha256: str,
        window_s: float,
        patience: Patience,
        resume: bool = False,
    ) -> None:
        """Send the update on disk. `resume`: the coordinator may have a part of it."""
        self.begun = assignment
        started = time.perf_counter()
        with self._store.open_update() as file:
            Upload(self._coordinator, assignment, file, n_bytes, sha256, self.bandwidth, window_s).send(
                patience, resume
            )
        self.bandwidth = self.bandwidth.after_upload(n_bytes, time.perf_counter() - started)

    def window_left_s(self, assignment: AssignmentId, patience: Patience) -> float:
        """How long the coordinator still waits for the report. Raises `AssignmentClosed` if it does not."""
        status = patiently(lambda: self._coordinator.status(assignment), patience)
        if status.state is AssignmentState.CLOSED:
            raise AssignmentClosed("assignment-closed", status.reason, 200)
        return min(status.window_s, WINDOW_S_MAX)

    def note(self, assignment: AssignmentId, answer: ReportAnswer, done: int, planned: int) -> None:
        self.count(answer)
        log.info("%s: %d of %d steps, %s: %s", assignment, done, planned, answer.outcome.value, answer.reason)

    def count(self, answer: ReportAnswer) -> None:
        self.reports += 1
        self.accepted += answer.outcome is Outcome.ACCEPTED


def decline(coordinator: CoordinatorClient, assignment: AssignmentId, reason: str, patience: Patience) -> None:
    """Tell the coordinator not to wait for this client. If that fails, the coordinator's own deadline applies."""
    try:
        patiently(lambda: coordinator.decline(assignment, reason), patience)
    except ClientError as error:
        log.debug("could not decline %s: %s", assignment, error)
