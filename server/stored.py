"""What a coordinator remembers of runs, rounds and uploads, as `store.py` takes and gives it. No database here."""

from dataclasses import dataclass

from umbel.aggregation.messages import ReportAnswer, RunStatus
from umbel.aggregation.records import RoundRecord
from umbel.aggregation.round import Recruiting, RoundState
from umbel.aggregation.runfile import RunFile
from umbel.aggregation.types import AssignmentId, ClientId, ModelRef, WorkDone


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run and its newest model. `master_sha256`: of the coordinator's full-precision copy."""

    file: RunFile
    status: RunStatus
    reason: str
    created_at: float
    model: ModelRef
    master_sha256: str
    first_model_sha256: str


@dataclass(frozen=True, slots=True)
class StoredRound:
    """One attempt at a round as it was last saved."""

    id: int
    revision: int
    state: RoundState


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """An update on its way, or whole. `sha256`: what the whole hashes to."""

    length: int
    offset: int
    sha256: str
    is_complete: bool


@dataclass(frozen=True, slots=True)
class StoredAssignment:
    """One client in one attempt. `answer`: what its report was told, None before that."""

    id: AssignmentId
    client: ClientId
    sample_count: int
    is_declined: bool
    answer: ReportAnswer | None
    reported_at: float | None
    bytes_up: int
    bytes_down: int
    upload: StoredUpload | None


@dataclass(frozen=True, slots=True)
class NewModel:
    """A committed round's outcome. `parent_sha256`: the version it was made from."""

    ref: ModelRef
    master_sha256: str
    parent_sha256: str


@dataclass(frozen=True, slots=True)
class Answered:
    """What one report was told, and what it said."""

    assignment: AssignmentId
    answer: ReportAnswer
    work: WorkDone
    at: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of bodies transferred for one assignment since they were last stored."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """What ends an attempt: its record, and what comes next (None: the run is over).

    `answered`: the report that ended it, if one did.
    """

    record: RoundRecord
    model: NewModel | None
    next_state: Recruiting | None
    status: RunStatus
    reason: str
    answered: tuple[Answered, ...] = ()
