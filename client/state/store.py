"""What a client keeps on disk, so that it resumes after a kill.

```
<state>/lock                          held by one process at a time
<state>/members/                      the member lists that this site trusts: members_store.py
<state>/<coordinator>/key.pem         Ed25519, mode 0600
<state>/<coordinator>/enrolment.json  the name this client is enrolled under, and the coordinator's address
<state>/<coordinator>/models/         the newest model, named by its SHA-256, or a part of it, and changes to it
<state>/<coordinator>/training/       a training in progress: checkpoint.safetensors
<state>/<coordinator>/pending/        an update that was trained and not answered yet: update.bin, then report.json
<state>/<coordinator>/feedback/       residuals of error feedback: VERSION.safetensors
<state>/<coordinator>/site/RUN/       what the client keeps across rounds of a run: VERSION.safetensors (site_state.py)
<state>/<coordinator>/failures/       how often this client has failed in secure rounds: failures.py
<state>/<coordinator>/secure/         which secure attempt was begun, and which sums hold an update of this client
<state>/<coordinator>/runs/RUN/       of an agent's run: its own models/, training/, pending/, feedback/ and lock
```

`report.json` is written last and removed first: while it exists, the update is whole and unanswered. A masked update
has no report here, because after a restart its keys are lost. `<coordinator>` is the (first) address that the client
enrolled under.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter

from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.files import JsonFile, file_sha256, flush, make_private, sync
from umbel.client.state.checkpoint import DiskCheckpoint
from umbel.client.state.failures import FailureStore
from umbel.client.state.feedback_store import FeedbackStore
from umbel.client.state.home import Home
from umbel.client.state.secure_store import SecureStore
from umbel.client.state.site_state import SiteStateStore
from umbel.client.state.state_dir import work_dir

log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class PendingReport:
    """Work that waits to be sent: the report, and the length of the update beside it."""

    assignment: AssignmentId
    work: WorkDone
    update_bytes: int


_PENDING = TypeAdapter(PendingReport)


class Store(Home):
    """One client's files for one coordinator. Only for the holder of the state directory's lock, or, of one run, for
    the holder of that run's lock.
    """

    def __init__(self, state_dir: Path, server: str, run: RunId | None = None) -> None:
        """`server`: `URL[,URL...]`; see `home_of`. `run`: the run whose work has a directory of its own, beside other
        runs of the same client; None: the client works for one run at a time.
        """
        super().__init__(state_dir, server)
        self._work = self.path if run is None else make_private(work_dir(self.path, run))
        self._models = make_private(self._work / "models")
        self._pending = make_private(self._work / "pending")
        self._report = JsonFile(self._pending / "report.json", _PENDING)
        self._update = self._pending / "update.bin"
        self.secure = SecureStore(self.path / "secure")
        self.failures = FailureStore(self.path / "failures")
        self.feedback = FeedbackStore(self._work / "feedback", self._pending / "feedback.safetensors")
        self.site_state = SiteStateStore(self.path / "site", self._pending / "site.safetensors")

    # --- models ---

    def model_path(self, sha256: str) -> Path:
        return self._models / f"{sha256}.safetensors"

    def change_path(self, sha256: str) -> Path:
        """The path of a whole change from one model to the next."""
        return self._models / f"{sha256}.change"

    def keep_only(self, *sha256s: str) -> None:
        """Remove all models and changes with other digests, whole or in the making."""
        for path in self._models.iterdir():
            if path.stem not in sha256s:
                path.unlink()

    # --- work that waits to be sent ---

    def checkpoint(self, offer: Assignment) -> DiskCheckpoint:
        """The checkpoint for this assignment. One of another assignment is removed."""
        path = self._work / "training" / "checkpoint.safetensors"
        belongs = {"assignment": offer.id, "model_sha256": offer.model.sha256}
        checkpoint = DiskCheckpoint(path, belongs, offer.model.size_bytes)
        checkpoint.load()
        return checkpoint

    def save_update(self, parts: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Write an update durably, piece by piece; returns its SHA-256 and length in bytes."""
        self._report.path.unlink(missing_ok=True)
        digest, n_bytes = hashlib.sha256(), 0
        with os.fdopen(os.open(self._update, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in parts:
                n_bytes += file.write(part)
                digest.update(part)
            flush(file)
        return digest.hexdigest(), n_bytes

    def save_report(self, pending: PendingReport) -> None:
        """Write the report. From then on the work survives a kill."""
        self._report.write(pending)

    def keep_waiting(self) -> None:
        """Keep what waits beside the update, which is about to be reported. Whether its work counts is asked later."""
        self.feedback.keep()
        self.site_state.keep()

    def pending(self) -> PendingReport | None:
        """The unanswered work of an earlier process; None if there is none. Damaged or partial work is dropped."""
        if (pending := self._report.read()) is None:
            self.forget_pending()
            return None
        is_whole = self._update.exists() and self._update.stat().st_size == pending.update_bytes
        if is_whole and file_sha256(self._update) == pending.work.update_sha256:
            return pending
        log.warning("dropped the unsent update for %s: its file is damaged", pending.assignment)
        self.forget_pending()
        return None

    def update(self) -> bytes:
        """The update that was saved last."""
        return self._update.read_bytes()

    def open_update(self) -> BinaryIO:
        return self._update.open("rb")

    def forget_work(self) -> None:
        """Remove all files of an assignment that has ended."""
        self.forget_pending()
        for path in (self._work / "training").glob("*"):
            path.unlink()

    def forget_pending(self) -> None:
        for path in (self._report.path, self._update, self.feedback.waiting, self.site_state.waiting):
            path.unlink(missing_ok=True)
        sync(self._pending)
