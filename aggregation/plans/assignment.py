"""What one client is asked to do, with which model; as plain data."""

from dataclasses import dataclass

from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import Task, TrainingPlan
from umbel.aggregation.types import AssignmentId, ClientId, RunId


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model version by what a client needs to fetch and check it. `sha256`: of the safetensors file, hex.

    Version 0 is the one a run was created with; each committed round, and each rollback, makes the next.
    """

    version: int
    sha256: str
    size_bytes: int
    layout_digest: str


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A file that makes a model of the one before it (`codec/change.py`). `from_sha256`: of that one.

    `sha256`, `size_bytes`: of the file itself, which is fetched as models are.
    """

    from_sha256: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SecureOffer:
    """Beside what every assignment has. `cohort`: names and identity keys (base64), in the order of the names.

    `window_s`: of the round, not what is left of it. `draws`: how often this client was drawn, which is public. The
    rest: `context.py`.
    """

    attempt_id: str
    opening_commitment: str
    cohort: tuple[tuple[str, str], ...]
    members_sha256: str
    window_s: float
    plan: SecurePlan
    draws: int = 1


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one client is asked to do. `window_s`: seconds left, counted from when this message was sent.

    `seed` is for the client's own batch order, dropout and the like: the same run, round and client give the same seed.
    (A client of a secure round draws its own.)
    `share`: how much of the steps to do, 1 for all; less is asked by a canary only. `rank`: the client's place among
    the cohort's names in their order, from 0. `changes`: of the newest versions, oldest first, the last of which makes
    `model`; each makes what the next begins with, and together they are smaller than the model. `secure`: of a round
    whose updates are masked, which then say nothing but to the cohort.
    """

    id: AssignmentId
    run: RunId
    round: int
    attempt: int
    model: ModelRef
    training: TrainingPlan
    codec: CodecPlan
    grid: Grid
    sample_count_max: int
    seed: int
    window_s: float
    task: Task = Task.TRAINING
    share: float = 1.0
    rank: int = 0
    changes: tuple[ModelChange, ...] = ()
    secure: SecureOffer | None = None

    @property
    def is_secure(self) -> bool:
        """Whether the update is masked."""
        return self.secure is not None


def assignment_id(run: RunId, number: int, attempt: int, client: ClientId, task: Task = Task.TRAINING) -> AssignmentId:
    """`run.round.attempt.client`, with `e` before the attempt of an evaluation, `c` before that of a canary.

    None of the four can hold a dot.
    """
    return AssignmentId(f"{run}.{number}.{task.mark}{attempt}.{client}")
