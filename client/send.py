"""Send an update: in chunks, from wherever the coordinator says it is, however often the line is cut."""

from typing import BinaryIO

from umbel.aggregation.types import AssignmentId
from umbel.client.coordinator import Coordinator, UploadState
from umbel.client.errors import CoordinatorMisbehaved, CoordinatorRefused, TryAgain
from umbel.client.transport import Patience, patiently

_CORRECTIONS_MAX = 8


class Upload:
    """One update on its way. `total`: bytes in `file`; `sha256`: of them all, hex."""

    def __init__(
        self,
        coordinator: Coordinator,
        assignment: AssignmentId,
        file: BinaryIO,
        total: int,
        sha256: str,
        chunk_bytes: int,
    ) -> None:
        self._coordinator = coordinator
        self._assignment = assignment
        self._file = file
        self._total = total
        self._sha256 = sha256
        self._chunk_bytes = chunk_bytes
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
            raise

    def _step(self) -> UploadState:
        """Send the next chunk after what is known to have arrived."""
        if self._known is None:
            return self._create()
        offset = self._known.offset
        try:
            return self._coordinator.append_upload(self._assignment, self._total, offset, self._chunk(offset))
        except CoordinatorRefused as error:
            return self._corrected(error)

    def _create(self) -> UploadState:
        try:
            return self._begin()
        except CoordinatorRefused as error:
            return self._corrected(error)

    def _begin(self) -> UploadState:
        return self._coordinator.create_upload(self._assignment, self._total, self._sha256, self._chunk(0))

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
            case _:
                raise error

    def _count_correction(self) -> None:
        self._corrections += 1
        if self._corrections > _CORRECTIONS_MAX:
            raise CoordinatorMisbehaved("the coordinator keeps changing its mind about what it has received")

    def _ask(self) -> UploadState | None:
        return self._coordinator.upload_state(self._assignment, self._total)

    def _chunk(self, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(min(self._chunk_bytes, self._total - offset))
