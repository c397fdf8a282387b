"""What is asked of one round: kind, sizes, window, weighting, training, codec and masks, as plain data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import (
    LOCAL_MAX,
    OVER_SELECTION_MAX,
    RATE_MAX,
    RATE_MIN,
    TARGET_MAX,
    ClientId,
    RunId,
    require_sample_count,
    require_slug,
    require_window,
    require_within,
)


class Task(StrEnum):
    """What a round asks of its clients: to train the model, only to measure it on their own held-out data, or to try
    with a share of the work whether they are fit for it."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    CANARY = "canary"

    @property
    def mark(self) -> str:
        """What stands before the attempt in the ids of its assignments: each kind has attempts of its own."""
        return {Task.TRAINING: "", Task.EVALUATION: "e", Task.CANARY: "c"}[self]

    @property
    def sends_updates(self) -> bool:
        """Whether its clients train, upload an update and report it; otherwise they measure, and report that alone."""
        return self is not Task.EVALUATION

    @property
    def makes_model(self) -> bool:
        """Whether its updates are summed, and its end makes the run's next version."""
        return self is Task.TRAINING

    @property
    def tries_clients(self) -> bool:
        """Whether it is the clients that are tried. They are chosen to differ, and measure how fit they are; whoever
        comes is judged, and who does not come is a finding too."""
        return self is Task.CANARY

    @property
    def may_be_left_out(self) -> bool:
        """Whether the run goes on without it where nobody does it: it is not waited for, nor tried again."""
        return self is Task.EVALUATION

    @property
    def follows_its_round(self) -> bool:
        """Whether it comes after the training of its number, to which it belongs."""
        return self is Task.EVALUATION

    @property
    def closing_words(self) -> str:
        """What is done when it has closed."""
        return {
            Task.TRAINING: "making the new model",
            Task.EVALUATION: "adding up what was measured",
            Task.CANARY: "judging what was tried",
        }[self]


class Weighting(StrEnum):
    """How clients are drawn and how their updates are averaged; `weighting.py` has the algebra."""

    SAMPLES = "samples"
    PROPORTIONAL = "proportional"


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
        if secure:
            secure = replace(secure, clients_max=self.n_wanted, minimum=self.minimum).unwrapping()
        return replace(self, codec=other.codec, secure=secure, n_released=other.n_released + was_revealed)

    @property
    def is_secure(self) -> bool:
        """Whether updates are masked."""
        return self.secure is not None

    @property
    def noise(self) -> NoisePlan | None:
        """What each client of a private round adds."""
        return self.secure.noise if self.secure else None

    @property
    def n_rounds_before(self) -> int:
        """How many rounds of training were committed before this one is begun."""
        return self.number if self.task.follows_its_round else self.number - 1

    @property
    def needs_counts(self) -> bool:
        """Whether clients must say how much data they have: not in a secure round that draws them evenly."""
        return not self.is_secure or self.weighting is Weighting.PROPORTIONAL

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


def ranks_of(cohort: Iterable[ClientId]) -> dict[ClientId, int]:
    """Each client's place among the names of a cohort in their order, from 0."""
    return {client: rank for rank, client in enumerate(sorted(cohort))}
