"""Early stopping: which version of a run is the best by one metric, when the run ends, which versions are kept. Pure.

It is decided anew after every round from the stored versions, so a restart changes nothing. `evaluation.NAME` is
measured on held-out samples, of the version that was measured; `training.NAME` by the local training of the round that
made the version. The idea is that of Prechelt, "Early stopping - but when?" (1998), section 2.1, criterion UP counted
in measurements.

One client must not end a run, and what it measured is its own word. So a version's value is a trimmed mean over clients
(Tukey 1962; Yin et al. 2018, "Byzantine-robust distributed learning", section 4): of n values, f = ceil(n / 10) at
either end are left out. If at most f clients lie, what is left lies between values of honest clients. The rest is
weighted by sample counts, none above their median, because a liar among the others could otherwise pull the mean to its
own value. A version has no value if fewer than `minimum` clients measured it. (A median would have few values far off
the mean where clients hold a handful of samples each, as phones do; so would a mean with more than a tenth left out.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from umbel.aggregation.phrases import counted
from umbel.aggregation.reports import Work
from umbel.aggregation.run.derived_metrics import with_derived
from umbel.aggregation.run.records import EVALUATION, Judged, VersionRecord
from umbel.aggregation.types import METRIC_ABS_MAX, TARGET_MAX, require_within

_TRIMMED = 10  # one in ten is left out at either end, and at least one


@dataclass(frozen=True, slots=True)
class RobustMean:
    """The trimmed mean over clients."""

    value: float
    n_clients: int  # including those left out
    n_trimmed: int  # left out at either end

    @property
    def words(self) -> str:
        """How it was made: `the mean over 8 of 10 clients, without the 1 least and the 1 greatest`."""
        if not self.n_trimmed:
            return f"the mean over {counted(self.n_clients, 'client')}"
        left = self.n_clients - 2 * self.n_trimmed
        n = self.n_trimmed
        return f"the mean over {left} of {self.n_clients} clients, without the {n} least and the {n} greatest"


def robust_mean(values: Sequence[tuple[float, int]]) -> RobustMean:
    """The trimmed mean of at least one client's finite value and positive sample count."""
    n = len(values)
    n_trimmed = math.ceil(n / _TRIMMED) if n >= 3 else 0
    kept = sorted(values)[n_trimmed : n - n_trimmed]
    cap = median(count for _, count in kept) if n_trimmed else math.inf
    weights = [min(count, cap) for _, count in kept]
    mean = math.fsum(weight * value for weight, (value, _) in zip(weights, kept, strict=True)) / math.fsum(weights)
    return RobustMean(min(max(mean, kept[0][0]), kept[-1][0]), n, n_trimmed)  # rounding must not leave the range


PATIENCE_MAX = 1_000_000
_SOURCES = (EVALUATION, "training.")


class Direction(StrEnum):
    """Which values of the metric are the better ones."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class StopRule:
    """The run file's section [stop]: when to end a run before its last round."""

    metric: str  # `evaluation.NAME` or `training.NAME`
    mode: Direction = Direction.MIN
    patience: int | None = None  # measurements in a row that do not improve on the best by more than `min_delta`
    min_delta: float = 0.0
    target: float | None = None  # a value that ends the run
    minimum: int = 3  # the fewest clients with which a measurement counts; below three, one of them can lie
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
        self, values: Mapping[str, float], measured_by: Mapping[str, int], counted_by: Mapping[str, int]
    ) -> Judged:
        """The value from a secure round, which has sums and no single values: one client can move them.

        All by whole names. `values`: means, and figures that follow from counts. `measured_by`: how many clients
        measured each mean; `counted_by`: how many have the counts of each figure.
        """
        value, n_clients = values.get(self.metric), counted_by.get(self.metric, measured_by.get(self.metric, 0))
        clients = counted(n_clients, "client")
        if value is None or n_clients < self.minimum:
            return Judged(self.metric, None, n_clients, self._too_few(n_clients))
        what = "from the counts" if self.metric in counted_by else "the mean"
        return Judged(self.metric, value, n_clients, f"{what} of {clients}, from a masked sum")

    def measured_by(self, works: Sequence[Work]) -> Judged | None:
        """The value from the reports of one round; None if no client measured the metric.

        Of a figure that follows from counts it takes each client's own value, because one client could set the figure
        of the sum.
        """
        name = self.metric.partition(".")[2]
        rows = [
            (with_derived(one.evaluation, one.evaluation_counts), one.evaluation_weights, one.evaluation_sample_count)
            if self.is_of_evaluation
            else (with_derived(one.metrics, one.counts), one.weights, one.sample_count)
            for one in works
        ]
        values = [(metrics[name], own.get(name, n_samples)) for metrics, own, n_samples in rows if name in metrics]
        if not values:
            return None
        if (n := len(values)) < self.minimum:
            return Judged(self.metric, None, n, self._too_few(n))
        mean = robust_mean(values)
        return Judged(self.metric, mean.value, n, mean.words)

    def _too_few(self, n_clients: int) -> str:
        have = counted(n_clients, "client has", "clients have")
        return f"{have} measured it, and it counts only if at least {self.minimum} do"

    def loss(self, value: float) -> float:
        """The value, or its negative, so that less is better."""
        return value if self.mode is Direction.MIN else -value


@dataclass(frozen=True, slots=True)
class MeasuredVersion:
    """The metric's value of one version."""

    version: int
    value: float


@dataclass(frozen=True, slots=True)
class StopVerdict:
    """The best version so far, and whether the run ends."""

    best: MeasuredVersion | None  # the earliest version with the best value
    reason: str | None  # why the run ends; None if it continues


def judge(rule: StopRule, versions: Sequence[VersionRecord]) -> StopVerdict:
    """Decide whether a run with these versions, in their order, has reached its target or run out of patience.

    A version that a rollback made begins a new count of patience. The best is taken over all versions.
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


def expired(versions: Sequence[VersionRecord], n_kept: int | None, rule: StopRule | None) -> tuple[int, ...]:
    """The versions to delete now, if `n_kept` of the newest are kept (None: all).

    Version 0 is always kept, and the best by the metric of early stopping, if the run has one.
    """
    if n_kept is None:
        return ()
    here = [one.version for one in versions if one.deleted_at is None]
    kept = {0, *here[len(here) - n_kept :]} if n_kept < len(here) else set(here)
    if rule is not None and (best := judge(rule, versions).best) is not None:
        kept.add(best.version)
    return tuple(version for version in here if version not in kept)
