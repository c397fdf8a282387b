"""Early stopping: which version of a run is the best by one metric, and whether it is time to end. Pure.

Judged anew after every round from what is stored of the versions, so a restart changes nothing. `evaluation.NAME` is
measured on held-out samples, of the version that was measured; `training.NAME` by the local training of the round that
made the version. One client's word must not end a run: a version's value is the mean that a tenth of the clients cannot
move out of what the others say (`robust_mean.py`), and it has none where fewer than `minimum` of them measured it.

The idea is that of Prechelt, "Early stopping - but when?" (1998), section 2.1, criterion UP counted in measurements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from umbel.aggregation.phrases import counted
from umbel.aggregation.reports import Work
from umbel.aggregation.run.records import EVALUATION, Judged, VersionRecord
from umbel.aggregation.run.robust_mean import robust_mean
from umbel.aggregation.types import METRIC_ABS_MAX, TARGET_MAX, require_within

PATIENCE_MAX = 1_000_000
_SOURCES = (EVALUATION, "training.")


class Direction(StrEnum):
    """Which values of the metric are the better ones."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to end a run before its last round.

    `patience`: measurements in a row that do not improve on the best by more than `min_delta`; `target`: a value to
    reach. `metric`: `evaluation.NAME` or `training.NAME`. `minimum`: clients without whom a measurement does not count;
    below three, one of them can lie.
    """

    metric: str
    mode: Direction = Direction.MIN
    patience: int | None = None
    min_delta: float = 0.0
    target: float | None = None
    minimum: int = 3
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a run file with an unknown key is refused at the rim

    def __post_init__(self) -> None:
        if not self.metric.startswith(_SOURCES) or self.metric in _SOURCES:
            raise ValueError(
                f'metric must be "evaluation.NAME" or "training.NAME", such as "evaluation.loss", not {self.metric!r}'
            )
        if self.patience is None and self.target is None:
            raise ValueError("set patience, target or both: without them nothing ends the run early")
        if self.patience is not None:
            require_within(self.patience, "patience", 1, PATIENCE_MAX)
        require_within(self.min_delta, "min_delta", 0, METRIC_ABS_MAX)
        if self.target is not None:
            require_within(self.target, "target", -METRIC_ABS_MAX, METRIC_ABS_MAX)
        require_within(self.minimum, "minimum", 1, TARGET_MAX)

    @property
    def is_of_evaluation(self) -> bool:
        """Whether the metric is measured on held-out data, which a run file must ask for."""
        return self.metric.startswith(EVALUATION)

    def measured_in_sum(
        self, training: Mapping[str, float], evaluation: Mapping[str, float], measured_by: Mapping[str, int]
    ) -> Judged:
        """What counts of a secure round, which has means and no single values: one client can move them.

        `measured_by`: how many clients measured each metric, by its whole name.
        """
        name = self.metric.partition(".")[2]
        value = (evaluation if self.is_of_evaluation else training).get(name)
        n_clients = measured_by.get(self.metric, 0)
        clients = counted(n_clients, "client")
        if value is None or n_clients < self.minimum:
            why = f"{clients} measured it, of {self.minimum} that must"
            return Judged(self.metric, None, n_clients, why)
        return Judged(self.metric, value, n_clients, f"the mean of {clients}, added up under masks")

    def measured_by(self, works: Sequence[Work]) -> Judged | None:
        """What these reports, of one round, make of the metric; None if nobody has measured it."""
        name = self.metric.partition(".")[2]
        rows = [
            (one.evaluation, one.evaluation_sample_count) if self.is_of_evaluation else (one.metrics, one.sample_count)
            for one in works
        ]
        values = [(metrics[name], n_samples) for metrics, n_samples in rows if name in metrics]
        if not values:
            return None
        if (n := len(values)) < self.minimum:
            have = counted(n, "client has", "clients have")
            return Judged(self.metric, None, n, f"{have} measured it, at least {self.minimum} must: it does not count")
        mean = robust_mean(values)
        return Judged(self.metric, mean.value, n, mean.words)

    def loss(self, value: float) -> float:
        """The value as something of which less is better."""
        return value if self.mode is Direction.MIN else -value


@dataclass(frozen=True, slots=True)
class MeasuredVersion:
    """The metric's value of one version."""

    version: int
    value: float


@dataclass(frozen=True, slots=True)
class StopVerdict:
    """`best`: the earliest version with the best value; `reason`: why the run is to end, in words, None to go on."""

    best: MeasuredVersion | None
    reason: str | None


def judge(rule: StopRule, versions: Sequence[VersionRecord]) -> StopVerdict:
    """Whether a run with these versions, in their order, has reached its target or lost its patience.

    A version that a rollback made begins a new count of patience; what is best is judged over all.
    """
    measured = [MeasuredVersion(v.version, v.judged) for v in versions if v.judged is not None]
    if not measured:
        return StopVerdict(None, None)
    best = min(measured, key=lambda one: (rule.loss(one.value), one.version))
    if rule.target is not None and rule.loss(best.value) <= rule.loss(rule.target):
        return StopVerdict(best, f"{rule.metric} has reached its target of {rule.target:g}: {_words(best)}")
    rolled_back = max((v.version for v in versions if v.rolled_back_to is not None), default=-1)
    since = max(rolled_back, _last_improved(rule, measured))
    n_since = sum(one.version > since for one in measured)
    if rule.patience is None or n_since < rule.patience:
        return StopVerdict(best, None)
    by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
    times = "measurement" if n_since == 1 else "measurements"
    return StopVerdict(best, f"{rule.metric} has not improved{by} in {n_since} {times}; the best is {_words(best)}")


def _last_improved(rule: StopRule, measured: Sequence[MeasuredVersion]) -> int:
    """The last version that was better than the best before it by more than `min_delta`; the first counts as such."""
    reference, version = math.inf, measured[0].version
    for one in measured:
        loss = rule.loss(one.value)
        if loss < reference - rule.min_delta:
            reference, version = loss, one.version
    return version


def _words(measured: MeasuredVersion) -> str:
    return f"{measured.value:.6g}, of version {measured.version}"
