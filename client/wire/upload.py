"""Upload an update in chunks, and resume after each cut at the offset that the coordinator reports.

The length of a chunk follows from the speed of the one before. A lost chunk is tried again at half the length, because
something on the way may not accept longer ones.
"""

import time
from dataclasses import dataclass
from typing import BinaryIO

from umbel.aggregation.types import AssignmentId
from umbel.aggregation.update.wire import CHUNK_BYTES_MIN, least_chunk_bytes
from umbel.client.errors import CoordinatorMisbehaved, CoordinatorRefused, TryAgain
from umbel.client.wire.coordinator import CoordinatorClient, UploadState
from umbel.client.wire.timing import CHUNK_BYTES_MAX, Bandwidth, chunk_bytes
from umbel.client.wire.transport import FileBody, Patience, patiently

_CORRECTIONS_MAX = 16  # halving the longest chunk to the shortest takes seven


@dataclass
class Upload:
    coordinator: CoordinatorClient
    assignment: AssignmentId
    file: BinaryIO
    total: int  # the length of the file in bytes
    sha256: str  # of the file
    bandwidth: Bandwidth  # as measured so far
    window_s: float

    def __post_init__(self) -> None:
        self._longest = CHUNK_BYTES_MAX
        self._chunk_bytes = self._within(chunk_bytes(self.bandwidth.expected_up or 0.0, self.window_s))
        self._known: UploadState | None = None
        self._must_ask = False
        self._corrections = 0

    def send(self, patience: Patience, resume: bool) -> None:
        """Send until the coordinator has the whole update. `resume`: it may have a part, so ask first."""
        self._must_ask = resume
        while self._known is None or not self._known.complete:
            before = self._known.offset if self._known else -1
            self._known = patiently(self._try_step, patience)
            if self._known.offset <= before and not self._known.complete:
                self._count_correction()

    def _try_step(self) -> UploadState:
        """Send a chunk. After a failed try the next one first asks how much has arrived."""
        try:
            if self._must_ask:
                self._known = self._ask()
                self._must_ask = False
            if self._known is not None and self._known.complete:
                return self._known
            return self._step()
        except TryAgain:
            self._must_ask = True
            self._chunk_bytes = self._within(self._chunk_bytes // 2)
            raise

    def _step(self) -> UploadState:
        """Send the next chunk after what is known to have arrived."""
        offset = self._known.offset if self._known else 0
        started = time.perf_counter()
        try:
            if self._known is None:
                state = self._begin()
            else:
                state = self.coordinator.append_upload(self.assignment, self.total, offset, self._chunk(offset))
        except CoordinatorRefused as error:
            return self._corrected(error)
        speed = (state.offset - offset) / max(time.perf_counter() - started, 1e-6)
        self._chunk_bytes = self._within(chunk_bytes(speed, self.window_s))
        return state

    def _begin(self) -> UploadState:
        return self.coordinator.create_upload(self.assignment, self.total, self.sha256, self._chunk(0))

    def _corrected(self, error: CoordinatorRefused) -> UploadState:
        """Resolve a disagreement about what has arrived. Raises any other `error`."""
        self._count_correction()
        match error.kind:
            case "mismatching-upload-offset":
                return self._ask() or self._begin()
            case "unknown-upload":
                return self._begin()
            case "upload-complete":  # of other bytes: an update that this client lost in a crash
                self.coordinator.forget_upload(self.assignment)
                return self._begin()
            # A limit of the coordinator's operator, or of a proxy.
            case "body-too-large" | "http-413" if self._chunk_bytes > CHUNK_BYTES_MIN:
                self._chunk_bytes = self._longest = max(self._chunk_bytes // 2, CHUNK_BYTES_MIN)
                return self._known or UploadState(0, complete=False)
            case _:
                raise error

    def _within(self, n_bytes: int) -> int:
        """The length of a chunk within the limits of the protocol and the operator."""
        return min(max(n_bytes, CHUNK_BYTES_MIN, least_chunk_bytes(self.total)), self._longest)

    def _count_correction(self) -> None:
        self._corrections += 1
        if self._corrections > _CORRECTIONS_MAX:
            raise CoordinatorMisbehaved(
                "the coordinator contradicts itself about how many bytes of the update it has received"
            )

    def _ask(self) -> UploadState | None:
        return self.coordinator.upload_state(self.assignment, self.total)

    def _chunk(self, offset: int) -> FileBody:
        return FileBody(self.file, offset, min(self._chunk_bytes, self.total - offset))
