"""The nouns that flow through a federated round, in the order in which they appear.

`RoundPlan` (what is asked of a round) -> `Assignment` (what one client is asked) -> `WorkDone` (what it says of its
update) -> `Aggregate` (what the sum holds) -> `ModelRef` (the next version). Tensors travel beside these, never inside.

Names end in their unit: `_s` seconds, `_bytes` bytes; `n_` and `_count` are counts.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType, TypeAlias

from umbel.aggregation.codec.plan import CodecPlan
from umbel.aggregation.metric_names import METRICS_MAX, require_metric_name
from umbel.aggregation.round.kinds import Task
from umbel.aggregation.secagg.numbers.plan import SecurePlan
from umbel.aggregation.secagg.offer import SecureOffer
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.update.grid import Grid

RunId = NewType("RunId", str)
ClientId = NewType("ClientId", str)
AssignmentId = NewType("AssignmentId", str)

SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
SHA256 = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[A-Za-z0-9+/]{86}==")
METRIC_ABS_MAX = 1e30  # times any sample count, over any cohort, it stays finite
SAMPLE_COUNT_MAX = 1 << 40
TARGET_MAX = 1 << 20
STEPS_MAX = 1 << 62
LOCAL_MAX = 1 << 31
RATE_MIN, RATE_MAX = 1e-12, 1e6
LINE_RATE_MIN, LINE_RATE_MAX = 1e-6, 1e15  # bytes per second
OVER_SELECTION_MAX = 10.0
WINDOW_MIN_S = 0.1
WINDOW_MAX_S = 366 * 86_400.0
SECONDS_MAX = 1e9
BYTES_MAX = 1 << 60
CHANGES_MAX = 8  # who is further behind fetches the whole model


class Weighting(StrEnum):
    """How clients are drawn and how their updates are averaged; `weighting.py` has the algebra."""

    SAMPLES = "samples"
    PROPORTIONAL = "proportional"


def require_slug(value: str, what: str) -> None:
    """Raise `ValueError` unless `value` can stand in a URL, a file name and a log line as it is."""
    if not SLUG.fullmatch(value):
        raise ValueError(
            f"{what} must be 1 to 63 of a-z, 0-9, '-', '_' and start with a letter or digit, not {value!r}"
        )


def require_sha256(value: str, what: str) -> None:
    """Raise `ValueError` unless `value` is a SHA-256 in the one spelling that file names and comparisons rely on."""
    if not SHA256.fullmatch(value):
        raise ValueError(f"{what} must be 64 lower-case hex digits")


def require_sample_count(value: int, what: str, least: int = 1) -> None:
    """Raise `ValueError` for a count that no weight could be made of."""
    if not least <= value <= SAMPLE_COUNT_MAX:
        raise ValueError(f"{what} must lie between {least} and 2^40, not {value}")


def require_within(value: float, what: str, least: float, most: float) -> None:
    """Raise `ValueError` for a number beyond its bounds; a NaN is beyond all."""
    if not least <= value <= most:
        bounds = " and ".join(f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (least, most))
        raise ValueError(f"{what} must lie between {bounds}, not {value!r:.40}")


def require_window(window_s: float) -> None:
    """Raise `ValueError` for a window that no round can have."""
    if not WINDOW_MIN_S <= window_s <= WINDOW_MAX_S:
        raise ValueError(
            f"window_s must lie between {WINDOW_MIN_S:g} and {WINDOW_MAX_S:.0f} (366 days), not {window_s!r:.40}"
        )


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a client is asked to do with the model: `local_epochs` or `local_steps`; by default, one epoch.

    `proximal_mu`: FedProx's mu (Li et al. 2020, eq. 2): the local objective gains mu/2 * ||w - w_global||^2.
    `evaluate`: first measure the model as it came on the client's own held-out data.
    """

    local_epochs: int | None = None
    local_steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 0.01
    proximal_mu: float = 0.0
    evaluate: bool = False
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a run file with an unknown key is refused at the rim

    def __post_init__(self) -> None:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("set either local_epochs or local_steps, not both")
        if self.local_epochs is None and self.local_steps is None:
            object.__setattr__(self, "local_epochs", 1)
        for name in ("local_epochs", "local_steps", "batch_size"):
            if (value := getattr(self, name)) is not None:
                require_within(value, name, 1, LOCAL_MAX)
        require_within(self.learning_rate, "learning_rate", RATE_MIN, RATE_MAX)
        require_within(self.proximal_mu, "proximal_mu", 0, RATE_MAX)


@dataclass(frozen=True, slots=True)
class CoverageFloor:
    """What must be in before a round may close early; `coverage.py` judges it, `cohort.py` draws for it.

    `samples`: share (0 to 1) of the samples that the cohort announced, and of each named tier's; `sites`: clients by
    name; `tiers`: values of the label `tier`, one client of each at least. At the window's end a round closes
    without what is missing and says so; a `strict` one is abandoned instead.
    """

    samples: float = 0.0
    sites: tuple[ClientId, ...] = ()
    tiers: tuple[str, ...] = ()
    strict: bool = False
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= 1:  # also refuses a NaN
            raise ValueError(f"samples must be a share between 0 and 1, not {self.samples}")
        for names, what in ((self.sites, "a site"), (self.tiers, "a tier")):
            for name in names:
                require_slug(name, what)
            if len(set(names)) < len(names):
                raise ValueError(
                    f"name {what} once; coverage repeats {sorted({n for n in names if names.count(n) > 1})}"
                )
        if self.strict and not self.is_set:
            raise ValueError("strict coverage needs samples, sites or tiers to insist on")

    @property
    def is_set(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.samples or self.sites or self.tiers)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What is asked of one round.

    The cohort is drawn `ceil(target * over_selection)` strong. The round closes at `target` reports, or `window_s`
    seconds after it opened if at least `minimum` are in. Under proportional weighting the target counts draws; the
    minimum always counts clients.
    `sample_count_max` bounds one client's weight, `max_abs` one coordinate of its update: both enter the public grid.
    `number` and `attempt` count from 1; a round that was abandoned is attempted again. `coverage`: what must be in.
    `tuned`: why window and over-selection are not those of the run file, in words; empty if they are (`tuning.py`).
    `task`: an evaluation measures the model after round `number`, a canary tries out round `number` before it; both
    have attempts of their own. `codec`: how updates are written, here or in the next round that has any. `secure`: of
    a round whose updates are masked. `n_released`: how many sums of the run were revealed before it, also by attempts
    that have made nothing of theirs.
    """

    run: RunId
    number: int
    attempt: int
    target: int
    minimum: int
    over_selection: float
    window_s: float
    weighting: Weighting
    sample_count_max: int
    max_abs: float
    seed: int
    coverage: CoverageFloor = field(default_factory=CoverageFloor)
    tuned: str = ""
    task: Task = Task.TRAINING
    codec: CodecPlan = field(default_factory=CodecPlan)
    secure: SecurePlan | None = None
    n_released: int = 0

    def __post_init__(self) -> None:
        require_slug(self.run, "run")
        if self.number < 1 or self.attempt < 1:
            raise ValueError(f"round and attempt count from 1, not {self.number} and {self.attempt}")
        require_within(self.target, "target", 1, TARGET_MAX)
        if not 1 <= self.minimum <= self.target:
            raise ValueError(f"minimum must lie between 1 and target = {self.target}, not {self.minimum}")
        require_within(self.over_selection, "over_selection", 1, OVER_SELECTION_MAX)
        require_window(self.window_s)
        if (n_named := len(self.coverage.sites) + len(self.coverage.tiers)) > self.target:
            raise ValueError(
                f"coverage names {n_named} sites and tiers, more than the target of {self.target}; raise it"
            )
        require_sample_count(self.sample_count_max, "sample_count_max")
        _ = self.grid  # refuses bounds that have no grid

    @property
    def n_wanted(self) -> int:
        """How many are asked, so that `target` report: ceil(target * over_selection)."""
        return math.ceil(round(self.target * self.over_selection, 9))  # rounded, or 10 * 1.1 would ask 12

    def numbered_as(self, other: "RoundPlan", *, was_revealed: bool = False) -> "RoundPlan":
        """This plan, with updates written as in `other`: another attempt, or another kind of round.

        `was_revealed`: whether the other's sum was. A masked sum may have been what failed there, so it takes the bits
        that none exceeds.
        """
        secure = other.secure
        if secure is not None:
            secure = replace(secure, clients_max=self.n_wanted, minimum=self.minimum).unwrapping()
        return replace(self, codec=other.codec, secure=secure, n_released=other.n_released + was_revealed)

    @property
    def n_rounds_before(self) -> int:
        """How many rounds of training were committed before this one is begun."""
        return self.number if self.task.follows_its_round else self.number - 1

    @property
    def needs_counts(self) -> bool:
        """Whether clients must say how much data they have: not in a secure round that draws them evenly."""
        return self.secure is None or self.weighting is Weighting.PROPORTIONAL

    @property
    def target_unit(self) -> str:
        """What the target counts, one of it: a client drawn twice under proportional weighting answers two draws."""
        return "draw" if self.weighting is Weighting.PROPORTIONAL else "report"

    @property
    def patience_s(self) -> float:
        """How long to wait for a full cohort before starting with fewer: a tenth of the window, 0.2 s to 30 s."""
        return min(max(self.window_s / 10, 0.2), 30.0)

    def seed_of(self, client: ClientId) -> int:
        """What this client's batch order, dropout and the like are drawn from.

        The attempt is left out: a round that had to be tried again trains as it would have the first time.
        """
        return derive_seed(self.seed, "client", self.number, client)

    @property
    def total_weight_max(self) -> int:
        """The greatest sum of weights this round can reach."""
        return self.n_wanted * (self.sample_count_max if self.weighting is Weighting.SAMPLES else 1)

    @property
    def grid(self) -> Grid:
        return Grid.finest(max_abs=self.max_abs, total_weight_max=self.total_weight_max)


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


@dataclass(frozen=True, slots=True)
class Probe:
    """What a client measured of itself in a canary; None for what it could not measure.

    `steps_full`: the steps of a whole round's work. `step_s`: seconds a step takes. `download_bytes_per_s`: of the
    model. `memory_bytes`: the process's peak; `memory_free_bytes`: what the machine (or container) had left then;
    `device_memory_bytes` of `device_memory_total_bytes`: the accelerator's peak. `first_loss`, `last_loss`: of the
    first and the last step, and finite; `is_loss_finite`: whether every loss that was seen is.
    """

    steps_full: int
    step_s: float
    download_bytes_per_s: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    device_memory_bytes: int | None = None
    device_memory_total_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    is_loss_finite: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.steps_full <= STEPS_MAX:
            raise ValueError(f"steps_full must lie between 1 and 2^62, not {self.steps_full}")
        if not 0 <= self.step_s <= SECONDS_MAX:  # also refuses a NaN
            raise ValueError(f"step_s must lie between 0 and {SECONDS_MAX:g}, not {self.step_s}")
        _require_rate(self.download_bytes_per_s, "download_bytes_per_s")
        for name in ("memory_bytes", "memory_free_bytes", "device_memory_bytes", "device_memory_total_bytes"):
            if (n_bytes := getattr(self, name)) is not None and not 0 <= n_bytes <= BYTES_MAX:
                raise ValueError(f"{name} must lie between 0 and 2^60, not {n_bytes}")
        for name in ("first_loss", "last_loss"):
            if (loss := getattr(self, name)) is not None and not abs(loss) <= METRIC_ABS_MAX:
                raise ValueError(f"{name} is {loss}; leave it out, and set is_loss_finite to false")


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What a client says of its update.

    `steps_done` of `steps_planned` local steps: fewer is partial work, and welcome. `update_sha256`: of the uploaded
    bytes. `metrics`: means over the local training; `evaluation`: of the model as it came, over
    `evaluation_sample_count` held-out samples. Metric values are finite. `upload_bytes_per_s`: how fast the update
    went, None where that was not measured. `probe`: in a canary, and there alone.
    """

    sample_count: int
    steps_done: int
    steps_planned: int
    update_sha256: str
    train_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation_sample_count: int = 0
    upload_bytes_per_s: float | None = None
    probe: Probe | None = None

    def __post_init__(self) -> None:
        require_sample_count(self.sample_count, "sample_count")
        if not 1 <= self.steps_done <= self.steps_planned <= STEPS_MAX:
            raise ValueError(
                f"steps_done must lie between 1 and steps_planned, not {self.steps_done} of {self.steps_planned}"
            )
        require_sha256(self.update_sha256, "update_sha256")
        if not (math.isfinite(self.train_s) and self.train_s >= 0):
            raise ValueError("train_s must be finite and not negative")
        require_sample_count(self.evaluation_sample_count, "evaluation_sample_count", least=0)
        if self.evaluation and not self.evaluation_sample_count:
            raise ValueError("an evaluation needs evaluation_sample_count")
        for metrics in (self.metrics, self.evaluation):
            _require_metrics(metrics)
        _require_rate(self.upload_bytes_per_s, "upload_bytes_per_s")

    @property
    def is_partial(self) -> bool:
        return self.steps_done < self.steps_planned


class _TellsNoTraining:
    """What is said of local training by a report that says nothing of it."""

    __slots__ = ()

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    @property
    def steps_done(self) -> int:
        return 0

    @property
    def steps_planned(self) -> int:
        return 0

    @property
    def is_partial(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class EvaluationDone(_TellsNoTraining):
    """What a client says of a model that it was asked to measure, and nothing else: there is no update.

    `evaluation`: means over `sample_count` held-out samples, finite.
    """

    sample_count: int
    evaluation: Mapping[str, float]
    evaluate_s: float = 0.0

    def __post_init__(self) -> None:
        require_sample_count(self.sample_count, "sample_count")
        if not (math.isfinite(self.evaluate_s) and self.evaluate_s >= 0):
            raise ValueError("evaluate_s must be finite and not negative")
        _require_metrics(self.evaluation)

    @property
    def evaluation_sample_count(self) -> int:
        return self.sample_count


@dataclass(frozen=True, slots=True)
class MaskedInput(_TellsNoTraining):
    """What a client says of a masked update: nothing of its work, which travels masked, too.

    `update_sha256`: of the uploaded bytes. `signature`: base64 of 64 bytes, the client's own over whom it has masked
    with and what it has sent (`secagg/session.py`). A field that is not one of these is refused, not passed over: the
    report is kept as it was signed, and nothing of a client's work may stand in it.
    """

    update_sha256: str
    signature: str
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as in the run file

    def __post_init__(self) -> None:
        require_sha256(self.update_sha256, "update_sha256")
        if not _SIGNATURE.fullmatch(self.signature):
            raise ValueError("signature must be the base64 of 64 bytes")

    @property
    def sample_count(self) -> int:
        return 0

    @property
    def evaluation_sample_count(self) -> int:
        return 0

    @property
    def evaluation(self) -> Mapping[str, float]:
        return {}


Work: TypeAlias = WorkDone | EvaluationDone | MaskedInput


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What a closed round's sum holds. `clients` in the order of their names."""

    clients: tuple[ClientId, ...]
    total_weight: int
    sample_count: int
    n_partial: int


def ranks_of(cohort: Iterable[ClientId]) -> dict[ClientId, int]:
    """Each client's place among the names of a cohort in their order, from 0."""
    return {client: rank for rank, client in enumerate(sorted(cohort))}


def assignment_id(run: RunId, number: int, attempt: int, client: ClientId, task: Task = Task.TRAINING) -> AssignmentId:
    """`run.round.attempt.client`, with `e` before the attempt of an evaluation, `c` before that of a canary.

    None of the four can hold a dot.
    """
    return AssignmentId(f"{run}.{number}.{task.mark}{attempt}.{client}")


def _require_rate(bytes_per_s: float | None, what: str) -> None:
    if bytes_per_s is not None and not LINE_RATE_MIN <= bytes_per_s <= LINE_RATE_MAX:
        raise ValueError(f"{what} must lie between 1e-6 and 1e15, not {bytes_per_s}")


def _require_metrics(metrics: Mapping[str, float]) -> None:
    if len(metrics) > METRICS_MAX:
        raise ValueError(f"at most {METRICS_MAX} metrics, not {len(metrics)}")
    for name, value in metrics.items():
        require_metric_name(name)
        if not abs(value) <= METRIC_ABS_MAX:  # also refuses a NaN
            raise ValueError(f"metric {name!r} is {value}; leave out what is not a number up to {METRIC_ABS_MAX:g}")
