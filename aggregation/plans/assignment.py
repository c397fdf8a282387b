"""What one client is asked to do, with which model; as plain data."""

from dataclasses import dataclass

from umbel.aggregation.canonical import later
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import Task
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.types import AssignmentId, ClientId, RunId


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model version, as a client fetches and checks it."""

    version: int  # 0 for the run's first; each committed round, and each rollback, makes the next
    sha256: str  # of the safetensors file, hex
    size_bytes: int
    layout_digest: str


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A file that turns a model into the next version (`downlink/change.py`)."""

    from_sha256: str  # of the model before
    sha256: str  # of the file itself, which is fetched as models are
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SecureOffer:
    """What the assignment of a secure round has besides; see also `secagg/context.py`."""

    attempt_id: str
    opening_commitment: str
    cohort: tuple[tuple[str, str], ...]  # names and identity keys (base64), in the order of the names
    members_sha256: str
    window_s: float  # of the round, not the rest of it
    plan: SecurePlan
    draws: int = 1  # of this client, which is public


@dataclass(frozen=True, slots=True)
class Assignment:
    id: AssignmentId
    run: RunId
    round: int
    attempt: int
    model: ModelRef
    training: TrainingPlan
    codec: CodecPlan
    grid: Grid
    sample_count_max: int
    seed: int  # for batch order and dropout, the same for one run, round and client; secure rounds do not use it
    window_s: float  # seconds left when this message was sent
    task: Task = Task.TRAINING
    share: float = 1.0  # of the steps to do; below 1 only in a canary
    rank: int = 0  # the client's place in the order of the cohort's names, from 0
    changes: tuple[ModelChange, ...] = ()  # in sequence, the last one makes `model`; together smaller than the model
    secure: SecureOffer | None = None  # of a round with masked updates
    tensors: TensorRules | None = later(None)  # what of the model travels, if the run file says so

    @property
    def is_secure(self) -> bool:
        """Whether the update is masked."""
        return self.secure is not None


def assignment_id(run: RunId, number: int, attempt: int, client: ClientId, task: Task = Task.TRAINING) -> AssignmentId:
    """`run.round.attempt.client`, with `e` before the attempt of an evaluation, `c` before that of a canary.

    None of the four can hold a dot.
    """
    return AssignmentId(f"{run}.{number}.{task.mark}{attempt}.{client}")


def run_of(assignment: str) -> RunId:
    """The run in an assignment's id, which may come from a peer and name no run at all."""
    return RunId(assignment.partition(".")[0])
