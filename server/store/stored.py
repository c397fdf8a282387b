"""The values that the stores load and save: runs, rounds, assignments, uploads. No database here."""

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
    """Bytes that a run's assignments have uploaded and downloaded."""

    up: Counter[AssignmentId] = field(default_factory=Counter[AssignmentId])
    down: Counter[AssignmentId] = field(default_factory=Counter[AssignmentId])

    @property
    def assignments(self) -> tuple[AssignmentId, ...]:
        return tuple(sorted(self.up.keys() | self.down.keys()))


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run and its newest model."""

    file: RunFile
    status: RunStatus
    reason: str
    created_at: float
    model: ModelRef
    master_sha256: str  # of the coordinator's full-precision copy
    first_model_sha256: str
    salt: bytes  # 16 random bytes, secret, the same for all replicas
    audit_number: int  # of its newest audit bundle, as the hash
    audit_sha256: str
    file_sha256: str  # of the run file, as in its first audit bundle
    changes: tuple[ModelChange, ...] = ()  # that lead to the newest model, oldest first


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run and its newest attempt as they were stored at `revision`."""

    run: StoredRun
    round_id: int
    state: RoundState
    folded_by: Mapping[ClientId, str]  # client -> the replica whose partial sum has its update
    revision: int

    @property
    def name(self) -> RunId:
        return RunId(self.run.file.name)

    @property
    def plan(self) -> RoundPlan:
        return self.state.closing.plan if isinstance(self.state, Committed) else self.state.plan

    def assignment_id(self, client: ClientId) -> AssignmentId:
        """The id of this client's assignment in the newest attempt, if it has one."""
        return assignment_id(self.name, self.plan.number, self.plan.attempt, client, self.plan.task)

    def knows(self, client: ClientId, assignment: AssignmentId) -> bool:
        """Whether this is the client's assignment in the newest attempt."""
        state = self.state.closing if isinstance(self.state, Committed) else self.state
        is_member = not isinstance(state, Recruiting) and client in state.cohort
        return is_member and self.assignment_id(client) == assignment

    def open_round(self, client: ClientId, now: float) -> Training | None:
        """The open round if it still waits for this client."""
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
        """Sums of a secure run that were revealed. A sum counts as soon as clients may have begun to reveal shares."""
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
    """A part of an update, in the blob store under `key`."""

    key: str
    length: int


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """An update, complete or not."""

    length: int
    offset: int  # bytes received
    sha256: str  # of the complete update
    is_complete: bool
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredAssignment:
    """One client in one attempt."""

    id: AssignmentId
    round_id: int
    client: ClientId
    sample_count: int
    is_declined: bool
    answer: ReportAnswer | None  # to its report
    reported_at: float | None
    bytes_up: int
    bytes_down: int
    heard_at: float  # the client's last request to any replica
    upload: StoredUpload | None = None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The record of an ended attempt. The attempts of a run end in the order of `round_id`."""

    round_id: int
    record: RoundRecord


@dataclass(frozen=True, slots=True)
class PartialSum:
    """One replica's sum of a round: int64, little-endian, in the blob store under `key`."""

    replica: str
    key: str
    sha256: str
    clients: tuple[ClientId, ...]
    total_weight: int


@dataclass(frozen=True, slots=True)
class ClientEvidence:
    """What the audit needs from one client."""

    public_key: bytes
    report: SignedReport | None  # None if it did not report in time


@dataclass(frozen=True, slots=True)
class Answered:
    """A report that counts, and its answer."""

    client: ClientId
    assignment: AssignmentId
    answer: ReportAnswer
    at: float
    signed: SignedReport


@dataclass(frozen=True, slots=True)
class Change:
    """What one step changes of a run. It is stored in one transaction."""

    state: RoundState
    answered: tuple[Answered, ...] = ()
    status: tuple[RunStatus, str] | None = None  # the run's new status and its reason
    declined: tuple[ClientId, ...] = ()  # in the step that closed the round: the new state does not list them
    sealed: tuple[tuple[AssignmentId, bytes], ...] = ()  # accepted ShareKeys messages of a secure round
    traffic: Traffic = field(default_factory=Traffic)  # of accepted messages of a secure round


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that has ended."""

    end: RoundEnd
    keys: tuple[str, ...]  # of blobs that nothing refers to any more
