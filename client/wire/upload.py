"""Send an update: in chunks, from wherever the coordinator says it is, however often the line is cut.

Each chunk's length follows from how fast the one before it went; one that was lost is tried again at half its length,
for something on the way may not bear longer ones.
"""

import time
from typing import BinaryIO

from umbel.aggregation.types import AssignmentId
from umbel.aggregation.update.wire import CHUNK_BYTES_MIN, least_chunk_bytes
from umbel.client.errors import CoordinatorMisbehaved, CoordinatorRefused, TryAgain
from umbel.client.wire.bandwidth import CHUNK_BYTES_MAX, Link, chunk_bytes
from umbel.client.wire.coordinator import CoordinatorClient, UploadState
from umbel.client.wire.transport import FileBody, Patience, patiently

_CORRECTIONS_MAX = 16  # halving the longest chunk to the shortest takes seven


class Upload:
    """One update on its way. `total`: bytes in `file`; `sha256`: of them all, hex; `link`: as measured before."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        assignment: AssignmentId,
        file: BinaryIO,
        total: int,
        sha256: str,
        link: Link,
        window_s: float,
    ) -> None:
        self._coordinator = coordinator
        self._assignment = assignment
        self._file = file
        self._total = total
        self._sha256 = sha256
        self._window_s = window_s
        self._longest = CHUNK_BYTES_MAX
        self._chunk_bytes = self._within(link.chunk_bytes(window_s))
        self._known: UploadState | None = None
        self._must_ask = False
        self._corrections = 0

    def send(self, patience: Patience, resume: bool) -> None:
        """Send until the coordinator has all of it. `resume`: some of it may be there already, so ask first.

        Each chunk that arrives starts the back-off anew; only silence counts against it.
        """
        self._must_ask = resume
        while self._known is None or not self._known.complete:
            before = self._known.offset if self._known else -1
            self._known = patiently(self._try_step, patience)
            if self._known.offset <= before and not self._known.complete:
                self._count_correction()

    def _try_step(self) -> UploadState:
        """After a failed try nobody knows what arrived, so the next one asks before it sends."""
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
            state = self._begin() if self._known is None else self._append(offset)
        except CoordinatorRefused as error:
            return self._corrected(error)
        speed = (state.offset - offset) / max(time.perf_counter() - started, 1e-6)
        self._chunk_bytes = self._within(chunk_bytes(speed, self._window_s))
        return state

    def _begin(self) -> UploadState:
        return self._coordinator.create_upload(self._assignment, self._total, self._sha256, self._chunk(0))

    def _append(self, offset: int) -> UploadState:
        return self._coordinator.append_upload(self._assignment, self._total, offset, self._chunk(offset))

    def _corrected(self, error: CoordinatorRefused) -> UploadState:
        """Where to go on when both ends disagree about what has arrived. Raises `error` for anything else."""
        self._count_correction()
        match error.kind:
            case "mismatching-upload-offset":
                return self._ask() or self._begin()
            case "unknown-upload":
                return self._begin()
            case "upload-complete":  # of other bytes: an update that an earlier life of this client has lost
                self._coordinator.forget_upload(self._assignment)
                return self._begin()
            case "body-too-large" | "http-413" if self._chunk_bytes > CHUNK_BYTES_MIN:  # its operator, or a proxy
                self._chunk_bytes = self._longest = max(self._chunk_bytes // 2, CHUNK_BYTES_MIN)
                return self._known or UploadState(0, complete=False)
            case _:
                raise error

    def _within(self, n_bytes: int) -> int:
        """A chunk's length, brought to what the protocol asks for and to what the operator allows."""
        return min(max(n_bytes, CHUNK_BYTES_MIN, least_chunk_bytes(self._total)), self._longest)

    def _count_correction(self) -> None:
        self._corrections += 1
        if self._corrections > _CORRECTIONS_MAX:
            raise CoordinatorMisbehaved("the coordinator keeps changing its mind about what it has received")

    def _ask(self) -> UploadState | None:
        return self._coordinator.upload_state(self._assignment, self._total)

    def _chunk(self, offset: int) -> FileBody:
        return FileBody(self._file, offset, min(self._chunk_bytes, self._total - offset))
