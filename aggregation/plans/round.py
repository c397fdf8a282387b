"""What is asked of one round: kind, sizes, window, weighting, codec and masks, as plain data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from umbel.aggregation.canonical import later
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.plans.masks import NoisePlan, SecurePlan
from umbel.aggregation.plans.proximal import MuState
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import (
    OVER_SELECTION_MAX,
    TARGET_MAX,
    ClientId,
    RunId,
    require_sample_count,
    require_slug,
    require_window,
    require_within,
)


class Task(StrEnum):
    """What a round asks of its clients."""

    TRAINING = "training"
    EVALUATION = "evaluation"  # measure the model on their own held-out data
    CANARY = "canary"  # do a share of the work, to show whether they are fit for it

    @property
    def mark(self) -> str:
        """The prefix of the attempt in assignment ids, because each kind counts its own attempts."""
        return {Task.TRAINING: "", Task.EVALUATION: "e", Task.CANARY: "c"}[self]

    @property
    def sends_updates(self) -> bool:
        """Whether its clients train and upload an update; otherwise they only measure."""
        return self is not Task.EVALUATION

    @property
    def makes_model(self) -> bool:
        """Whether its updates are summed and make the run's next version."""
        return self is Task.TRAINING

    @property
    def tries_clients(self) -> bool:
        """Whether it tests its clients, which are chosen to differ; a missing client is a finding too."""
        return self is Task.CANARY

    @property
    def may_be_left_out(self) -> bool:
        """Whether the run continues without it if too few clients take part."""
        return self is Task.EVALUATION

    @property
    def follows_its_round(self) -> bool:
        """Whether it comes after the training round of the same number."""
        return self is Task.EVALUATION

    @property
    def closing_words(self) -> str:
        """What happens when it has closed, in words."""
        return {
            Task.TRAINING: "making the new model",
            Task.EVALUATION: "adding up the measurements",
            Task.CANARY: "judging the clients",
        }[self]


class Weighting(StrEnum):
    """How clients are drawn and how their updates are averaged; `weighting.py` has the algebra."""

    SAMPLES = "samples"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class CoverageFloor:
    """What must be in before a round may close early (`coverage.py`, `cohort.py`)."""

    samples: float = 0.0  # share (0 to 1) of the samples that the cohort announced, and of each named tier's
    sites: tuple[ClientId, ...] = ()  # clients by name
    tiers: tuple[str, ...] = ()  # values of the label `tier`, one client of each at least
    strict: bool = False  # at the window's end: abandon the round, instead of closing it without the missing parts
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= 1:  # also refuses a NaN
            raise ValueError(f"samples must be a share between 0 and 1, not {self.samples}")
        for names, what in ((self.sites, "a site"), (self.tiers, "a tier")):
            for name in names:
                require_slug(name, what)
            if len(set(names)) < len(names):
                raise ValueError(
                    f"coverage repeats {sorted({n for n in names if names.count(n) > 1})}; name {what} only once"
                )
        if self.strict and not self.is_set:
            raise ValueError("strict = true in [coverage] needs samples, sites or tiers: set one of them")

    @property
    def is_set(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.samples or self.sites or self.tiers)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What is asked of one round.

    The cohort has `ceil(target * over_selection)` clients. The round closes at `target` reports, or `window_s` seconds
    after it opened if at least `minimum` are in.
    """

    run: RunId
    number: int  # from 1; an evaluation follows the round of its number, a canary precedes it
    attempt: int  # from 1 for each kind of round; an abandoned round is attempted again
    target: int  # reports; under proportional weighting draws
    minimum: int  # clients
    over_selection: float
    window_s: float
    weighting: Weighting
    sample_count_max: int  # bounds one client's weight
    max_abs: float  # bounds one coordinate of an update
    seed: int
    coverage: CoverageFloor = field(default_factory=CoverageFloor)
    tuned: str = ""  # why window and over-selection are not the run file's; empty if they are (`tuning.py`)
    task: Task = Task.TRAINING
    codec: CodecPlan = field(default_factory=CodecPlan)  # of this round, or of the next one with updates
    secure: SecurePlan | None = None  # of a round with masked updates
    n_released: int = 0  # sums of the run revealed before, including those of abandoned attempts
    mu: MuState | None = later(None)  # FedProx's, of this round or of the next one of training; None: it does not adapt

    def __post_init__(self) -> None:
        require_slug(self.run, "run")
        if self.number < 1 or self.attempt < 1:
            raise ValueError(f"round and attempt must be at least 1, not {self.number} and {self.attempt}")
        require_within(self.target, "target", 1, TARGET_MAX)
        if not 1 <= self.minimum <= self.target:
            raise ValueError(f"minimum must lie between 1 and target = {self.target}, not {self.minimum}")
        require_within(self.over_selection, "over_selection", 1, OVER_SELECTION_MAX)
        require_window(self.window_s)
        if (n_named := len(self.coverage.sites) + len(self.coverage.tiers)) > self.target:
            raise ValueError(
                f"coverage names {n_named} sites and tiers, more than the target of {self.target}; raise target"
            )
        require_sample_count(self.sample_count_max, "sample_count_max")
        _ = self.grid  # refuses bounds that have no grid

    @property
    def n_wanted(self) -> int:
        """The number of clients that are asked: ceil(target * over_selection)."""
        return math.ceil(round(self.target * self.over_selection, 9))  # rounded, or 10 * 1.1 would ask 12

    def numbered_as(self, other: "RoundPlan", *, was_revealed: bool = False) -> "RoundPlan":
        """A copy that keeps `other`'s codec, secure plan and mu: for another attempt, or another kind of round.

        `was_revealed`: whether the other's sum was. A masked sum may have wrapped there, so this one cannot wrap.
        """
        secure = other.secure
        if secure:
            secure = replace(secure, clients_max=self.n_wanted, minimum=self.minimum)
            # An evaluation has no update. It hands on the bits that suit the training after it.
            if not (self.task.follows_its_round or other.task.follows_its_round):
                secure = secure.unwrapping()
        n_released = other.n_released + was_revealed
        return replace(self, codec=other.codec, secure=secure, n_released=n_released, mu=other.mu)

    @property
    def is_secure(self) -> bool:
        """Whether updates are masked."""
        return self.secure is not None

    @property
    def has_uploads(self) -> bool:
        """Whether its clients upload: an update or, in a secure evaluation, what they measured under masks."""
        return self.task.sends_updates or self.is_secure

    @property
    def adds_up(self) -> bool:
        """Whether its uploads are added up."""
        return self.task.makes_model or self.is_secure

    @property
    def noise(self) -> NoisePlan | None:
        """The noise that each client of a private round adds."""
        return self.secure.noise if self.secure else None

    @property
    def n_rounds_before(self) -> int:
        """The number of rounds of training committed before this one begins."""
        return self.number if self.task.follows_its_round else self.number - 1

    @property
    def needs_counts(self) -> bool:
        """Whether clients must report their sample counts: not in a secure round that draws them evenly."""
        return not self.is_secure or self.weighting is Weighting.PROPORTIONAL

    @property
    def target_unit(self) -> str:
        """The unit of the target: under proportional weighting a client drawn twice counts as two draws."""
        return "draw" if self.weighting is Weighting.PROPORTIONAL else "report"

    @property
    def patience_s(self) -> float:
        """The longest wait for a full cohort: a tenth of the window, 0.2 s to 30 s."""
        return min(max(self.window_s / 10, 0.2), 30.0)

    def seed_of(self, client: ClientId) -> int:
        """The seed of this client's batch order and dropout, the same in every attempt at the round."""
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
