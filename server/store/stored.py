"""What a coordinator remembers of runs, rounds and uploads, as the stores take and give it. No database here."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from umbel.aggregation.audit.bundle import SignedReport
from umbel.aggregation.messages import ReportAnswer, RunStatus
from umbel.aggregation.plans.assignment import ModelChange, ModelRef, assignment_id
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.states import Abandoned, Closing, Committed, Recruiting, RoundState, Training
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.run_end import RoundEnd
from umbel.aggregation.types import AssignmentId, ClientId, RunId


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one run, by assignment: bytes that came up and that went down."""

    up: Counter[AssignmentId] = field(default_factory=Counter[AssignmentId])
    down: Counter[AssignmentId] = field(default_factory=Counter[AssignmentId])

    @property
    def assignments(self) -> tuple[AssignmentId, ...]:
        """Of which anything is counted."""
        return tuple(sorted(self.up.keys() | self.down.keys()))


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run and its newest model. `master_sha256`: of the coordinator's full-precision copy.

    `salt`: 16 random bytes, the same for all replicas and told to nobody. `audit_number`, `audit_sha256`: its newest
    audit bundle. `changes`: what leads to the newest model from the versions before it, oldest first.
    """

    file: RunFile
    status: RunStatus
    reason: str
    created_at: float
    model: ModelRef
    master_sha256: str
    first_model_sha256: str
    salt: bytes
    audit_number: int
    audit_sha256: str
    changes: tuple[ModelChange, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run and its newest attempt as they were stored at `revision`.

    `folded_by`: whose partial sum each accepted update is in.
    """

    run: StoredRun
    round_id: int
    state: RoundState
    folded_by: Mapping[ClientId, str]
    revision: int

    @property
    def name(self) -> RunId:
        return RunId(self.run.file.name)

    @property
    def plan(self) -> RoundPlan:
        """The plan of the newest attempt."""
        return self.state.closing.plan if isinstance(self.state, Committed) else self.state.plan

    def assignment_id(self, client: ClientId) -> AssignmentId:
        """This client's assignment in the newest attempt, if it has one."""
        return assignment_id(self.name, self.plan.number, self.plan.attempt, client, self.plan.task)

    def knows(self, client: ClientId, assignment: AssignmentId) -> bool:
        """Whether this is the client's assignment in the newest attempt."""
        state = self.state.closing if isinstance(self.state, Committed) else self.state
        is_member = not isinstance(state, Recruiting) and client in state.cohort
        return is_member and self.assignment_id(client) == assignment

    def open_round(self, client: ClientId, now: float) -> Training | None:
        """The round under way, if it still waits for this client."""
        state = self.state
        if not isinstance(state, Training) or now >= state.closes_at:
            return None
        is_waited_for = client in state.cohort and client not in state.accepted and client not in state.declined
        return state if is_waited_for else None

    @property
    def rounds_done(self) -> int:
        """Committed rounds of training."""
        return self.plan.n_rounds_before + (isinstance(self.state, Committed) and self.plan.task.makes_model)

    @property
    def n_released(self) -> int:
        """Sums of a secure run that were revealed; one counts as soon as clients may have begun to reveal shares."""
        match self.state:
            case Committed():
                is_released = self.plan.is_secure
            case Abandoned() as abandoned:
                is_released = abandoned.secure.was_revealed
            case Closing() as closing:
                is_released = closing.is_unmasking
            case Recruiting() | Training():
                is_released = False
            case _:
                assert_never(self.state)
        return self.plan.n_released + is_released


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an update: `length` bytes in the blob store."""

    key: str
    length: int


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """An update on its way, or whole. `sha256`: what the whole hashes to; `offset`: how many bytes are in."""

    length: int
    offset: int
    sha256: str
    is_complete: bool
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredAssignment:
    """One client in one attempt. `answer`: what its report was told, None before that.

    `heard_at`: when a request of this client was last noted, by any replica.
    """

    id: AssignmentId
    round_id: int
    client: ClientId
    sample_count: int
    is_declined: bool
    answer: ReportAnswer | None
    reported_at: float | None
    bytes_up: int
    bytes_down: int
    heard_at: float
    upload: StoredUpload | None = None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The record of an ended attempt. `round_id`: the attempts of a run end in the order of their ids."""

    round_id: int
    record: RoundRecord


@dataclass(frozen=True, slots=True)
class PartialSum:
    """What one replica has folded of a round: int64, little-endian, in the blob store under `key`."""

    replica: str
    key: str
    sha256: str
    clients: tuple[ClientId, ...]
    total_weight: int


@dataclass(frozen=True, slots=True)
class ClientEvidence:
    """What is stored of one client for the audit: its public key, and its report, if it reported in time."""

    public_key: bytes
    report: SignedReport | None


@dataclass(frozen=True, slots=True)
class Answered:
    """A report that counts, and its answer. `signed`: the report as the client signed it."""

    client: ClientId
    assignment: AssignmentId
    answer: ReportAnswer
    at: float
    signed: SignedReport


@dataclass(frozen=True, slots=True)
class Change:
    """What an event makes of a run: to be stored at once. `status`: the run's, where it changes.

    `declined`: who has declined in the step that closed the round, where the new state does not tell. `sealed`: the
    ShareKeys messages of a secure round that count. `traffic`: of messages of a secure round that count.
    """

    state: RoundState
    answered: tuple[Answered, ...] = ()
    status: tuple[RunStatus, str] | None = None
    declined: tuple[ClientId, ...] = ()
    sealed: tuple[tuple[AssignmentId, bytes], ...] = ()
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that has ended, and the blobs that nothing refers to any more."""

    end: RoundEnd
    keys: tuple[str, ...]
