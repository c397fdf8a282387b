"""What an experiment has found: its runs, means over their seeds with confidence intervals, and the best points."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from umbel.aggregation.phrases import part_of
from umbel.aggregation.run.lean import Lean
from umbel.aggregation.run.quantiles import quantiles
from umbel.sim.data.partition.heterogeneity import Heterogeneity
from umbel.sim.experiment.file import point_label
from umbel.sim.experiment.trials import Estimate, TrialResult
from umbel.sim.federation.rows import REASONS_MAX, Row
from umbel.sim.recorded.against_trace import AgainstTrace
from umbel.sim.results.target import TargetReached, reaching


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the sweep, over all seeds."""

    label: str
    values: Mapping[str, object]
    seeds: tuple[int, ...]
    accuracy: Estimate | None  # of the last model, as is `loss`
    best_accuracy: Estimate | None
    loss: Estimate | None
    late_accuracy: Estimate | None  # the mean over the second half of the measured models, for unsteady runs
    late_loss: Estimate | None
    rounds: Estimate | None
    bytes_up: Estimate | None
    bytes_down: Estimate | None
    virtual_hours: Estimate | None
    wasted_share: Estimate | None  # of the devices' working time
    wall_s: Estimate | None
    reached_target: int
    rounds_to_target: Estimate | None  # as `TargetReached.rounds`; over the seeds that reach it, as are the next two
    hours_to_target: Estimate | None  # until the first measured model with the target accuracy, as is the next one
    bytes_up_to_target: Estimate | None
    groups: Mapping[str, Estimate]  # the last model's accuracy for each natural holder
    split: Heterogeneity | None  # how different clients are with the first seed
    partial_share: Estimate | None  # of the reports that count, those with fewer steps than planned
    left_out_share: Estimate | None  # of the clients that were asked, those whose reports do not count
    samples_share: Estimate | None  # of the samples of asked clients, those that count
    lean: Lean  # the committed rounds of all seeds, added up
    groups_mean: Estimate | None  # the mean of `groups`, each with the same weight; else over clients, if measured
    groups_worst: Estimate | None  # the accuracy of the worst of those that `groups_mean` is the mean of
    groups_p10: Estimate | None  # a tenth of those have at most this accuracy
    late_groups_mean: Estimate | None  # these three: the mean over the second half of the measured models, of unsteady
    late_groups_worst: Estimate | None  # runs; only where [measure] asks for groups
    late_groups_p10: Estimate | None
    train_loss_all: Estimate | None  # of the last model, as [measure] asks
    smoothed_rounds_to_target: Estimate | None  # by the mean accuracy of the last measured models, as [measure] asks
    asked: int  # clients, in all attempts of all seeds; a client that was asked twice counts twice
    declined: int  # of these
    declined_for: Mapping[str, int]  # the most frequent reasons, with numbers

    @property
    def decline_words(self) -> str:
        """How many clients declined and the most frequent reason, in a sentence; empty if none did."""
        if not self.declined:
            return ""
        said = part_of(self.declined, self.asked, "asked client", "declined", "declined")
        reason, n_clients = max(self.declined_for.items(), key=lambda one: one[1])
        often = "for this reason" if n_clients == self.declined else f"most often ({n_clients} times) for this reason"
        return f"{said}, {often}: {reason}"


@dataclass(frozen=True, slots=True)
class BestOf:
    """The best of the points that differ only in the keys of `best_over`."""

    label: str  # of what these points have in common; empty if nothing else is swept
    values: Mapping[str, object]  # of the best point, for the keys of `best_over`
    point: Point
    n_points: int  # that were compared

    def summary(self) -> dict[str, Any]:
        """As JSON; `point` is the label of the best point."""
        return {
            "label": self.label,
            "values": dict(self.values),
            "point": self.point.label,
            "n_points": self.n_points,
            "reached_target": self.point.reached_target,
            "rounds_to_target": None if self.point.rounds_to_target is None else asdict(self.point.rounds_to_target),
            "best_accuracy": None if self.point.best_accuracy is None else asdict(self.point.best_accuracy),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Findings:
    """What an experiment has found, as data."""

    name: str
    trials: tuple[TrialResult, ...]
    target_accuracy: float | None = None
    folder: Path | None = None  # of rounds.jsonl, summary.json and the pictures; None if nothing was written
    against: tuple[AgainstTrace, ...] = ()  # for each trace that a fleet is made of
    splits: Mapping[str, Heterogeneity] = field(default_factory=dict[str, Heterogeneity])
    notes: tuple[str, ...] = ()  # sentences about keys of the file that had no effect
    best_over: tuple[str, ...] = ()  # names of `[sweep]`, of whose values `best_of` has the best

    @property
    def has_devices(self) -> bool:
        """Whether any point simulates devices, so that time passes."""
        return any(one.trial.fleet is not None for one in self.trials)

    @property
    def engines(self) -> tuple[str, ...]:
        """A sentence for each engine that "auto" chose, with the reason that it had in the first run."""
        chosen = dict[str, str]()
        for one in self.trials:
            if one.engine_why:
                chosen.setdefault(one.engine, one.engine_why)
        return tuple(f'the engine "auto" took "{name}": {why}' for name, why in chosen.items())

    @property
    def leans(self) -> tuple[str, ...]:
        """A sentence for each point that left clients out or took partial work."""
        points = [(point.label, point.lean.words) for point in self.points]
        return tuple(f"{label}: {words}" if label else words for label, words in points if words)

    @property
    def declines(self) -> tuple[str, ...]:
        """A sentence for each point whose clients declined work."""
        points = [(point.label, point.decline_words) for point in self.points]
        return tuple(f"{label}: {words}" if label else words for label, words in points if words)

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row of every run, with its point and its seed: the content of `rounds.jsonl`."""
        for one in self.trials:
            best = BestSoFar(one.trial.measure.smooth)
            for row in one.rows:
                yield {"point": one.trial.label, "seed": one.trial.seed, **asdict(row), **best.after(row)}

    @property
    def points(self) -> tuple[Point, ...]:
        """In the order of the file's sweep."""
        return tuple(self._point(label, group) for label, group in self.by_point.items())

    @property
    def best_of(self) -> tuple[BestOf, ...]:
        """For each choice of the other swept keys, the best values of `best_over`; empty without such keys.

        A point is better if more seeds reach the target, then if they need fewer rounds for it on average, then if the
        mean of the seeds' best accuracies is higher.
        """
        alike = dict[str, list[Point]]()
        for point in self.points if self.best_over else ():
            others = {name: value for name, value in point.values.items() if name not in self.best_over}
            alike.setdefault(point_label(others), []).append(point)
        found = list[BestOf]()
        for label, points in alike.items():
            best = max(points, key=_goodness)
            found.append(BestOf(label, {name: best.values[name] for name in self.best_over}, best, len(points)))
        return tuple(found)

    @property
    def by_point(self) -> dict[str, list[TrialResult]]:
        """The runs by point, one for every seed."""
        return by_point(self.trials)

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        runs = [
            {
                "point": one.trial.label,
                "seed": one.trial.seed,
                "status": one.status.value,
                "reason": one.reason,
                "model_sha256": one.model_sha256,
                "epsilon": one.epsilon,
                "engine": one.engine,
                "engine_why": one.engine_why,
                "wall_s": round(one.wall_s, 3),
            }
            for one in self.trials
        ]
        return {
            "experiment": self.name,
            "target_accuracy": self.target_accuracy,
            "points": [_facts(point) for point in self.points],
            "best_over": list(self.best_over),
            "best_of": [one.summary() for one in self.best_of],
            "runs": runs,
            "against": [one.summary() for one in self.against],
            "notes": list(self.notes),
        }

    def _point(self, label: str, group: Sequence[TrialResult]) -> Point:
        lasts = [one.scored[-1] for one in group if one.scored]
        reached = [found for one in group if (found := self._reaching(one)) is not None]
        reasons = sum((Counter(row.declined_for) for one in group for row in one.rows), Counter[str]())
        leans = [Lean.of(row for row in one.rows if row.makes_model) for one in group]
        return Point(
            label=label,
            values=group[0].trial.point,
            seeds=tuple(one.trial.seed for one in group),
            accuracy=Estimate.of([row.accuracy for row in lasts if row.accuracy is not None]),
            best_accuracy=_estimated(_best(one) for one in group),
            loss=Estimate.of([row.loss for row in lasts if row.loss is not None]),
            late_accuracy=_estimated(_mean(_late(one), "accuracy") for one in group),
            late_loss=_estimated(_mean(_late(one), "loss") for one in group),
            rounds=Estimate.of([float(sum(row.makes_model for row in one.rows)) for one in group]),
            bytes_up=Estimate.of([float(sum(row.bytes_up for row in one.rows)) for one in group]),
            bytes_down=Estimate.of([float(sum(row.bytes_down for row in one.rows)) for one in group]),
            virtual_hours=Estimate.of([one.rows[-1].now_s / 3600 for one in group if one.rows]),
            wasted_share=Estimate.of([_wasted(one) for one in group]),
            wall_s=Estimate.of([one.wall_s for one in group]),
            reached_target=len(reached),
            rounds_to_target=Estimate.of([one.rounds for one in reached]),
            hours_to_target=Estimate.of([one.row.now_s / 3600 for one in reached]),
            bytes_up_to_target=Estimate.of([float(one.bytes_up) for one in reached]),
            groups=_by_group(group),
            split=self.splits.get(label),
            partial_share=_estimated(one.partial_share for one in leans),
            left_out_share=_estimated(one.left_out_share for one in leans),
            samples_share=_estimated(one.samples_share for one in leans),
            lean=sum(leans, Lean()),
            groups_mean=_estimated(_groups_mean(one) for one in group),
            groups_worst=_estimated(_groups_quantile(one, "least") for one in group),
            groups_p10=_estimated(_groups_quantile(one, "p10") for one in group),
            late_groups_mean=_estimated(_late_groups(one, lambda row: row.groups_accuracy) for one in group),
            late_groups_worst=_estimated(_late_groups(one, lambda row: _quantile_in(row, "least")) for one in group),
            late_groups_p10=_estimated(_late_groups(one, lambda row: _quantile_in(row, "p10")) for one in group),
            train_loss_all=_estimated(row.train_loss_all for row in lasts),
            smoothed_rounds_to_target=_estimated(self._smoothly_reaching(one) for one in group),
            asked=sum(row.selected for one in group for row in one.rows),
            declined=sum(row.declined for one in group for row in one.rows),
            declined_for=dict(reasons.most_common(REASONS_MAX)),
        )

    def _smoothly_reaching(self, one: TrialResult) -> float | None:
        """The round after which the smoothed accuracy first is the target; None if it never is, or is not asked."""
        best = BestSoFar(one.trial.measure.smooth)
        for row in one.rows:
            smoothed = best.after(row).get("smoothed_accuracy")
            if self.target_accuracy is not None and smoothed is not None and smoothed >= self.target_accuracy:
                return float(row.round)
        return None

    def _reaching(self, one: TrialResult) -> TargetReached | None:
        return None if self.target_accuracy is None else reaching(one.rows, self.target_accuracy)


class BestSoFar:
    """Follows the accuracy of one run. `smooth`: how many measured models to average; None: nothing is followed."""

    def __init__(self, smooth: int | None) -> None:
        self._last = None if smooth is None else deque[float](maxlen=smooth)
        self._best: float | None = None

    def after(self, row: Row) -> dict[str, float | None]:
        """`best_accuracy` so far and `smoothed_accuracy`, the mean of the last measured models.

        The second is None until there are `smooth` of them, and in rows whose model was not measured.
        """
        if self._last is None:
            return {}
        if row.accuracy is not None:
            self._last.append(row.accuracy)
            self._best = max(row.accuracy, self._best or 0.0)
        is_full = row.accuracy is not None and len(self._last) == self._last.maxlen
        smoothed = math.fsum(self._last) / len(self._last) if is_full else None
        return {"best_accuracy": self._best, "smoothed_accuracy": smoothed}


def by_point(trials: Sequence[TrialResult]) -> dict[str, list[TrialResult]]:
    """Runs by their point."""
    groups = dict[str, list[TrialResult]]()
    for one in trials:
        groups.setdefault(one.trial.label, []).append(one)
    return groups


def _goodness(point: Point) -> tuple[float, float, float]:
    """Greater for a better point, as `Findings.best_of` defines it."""
    rounds, accuracy = point.rounds_to_target, point.best_accuracy
    return (
        point.reached_target,
        -math.inf if rounds is None else -rounds.mean,
        -math.inf if accuracy is None else accuracy.mean,
    )


def _facts(point: Point) -> dict[str, Any]:
    """As JSON, without a missing split."""
    facts = asdict(point)
    if point.split is None:
        del facts["split"]
    return facts


def _groups_mean(one: TrialResult) -> float | None:
    """Of the last model: the mean over natural holders, each with the same weight; else over clients, if measured."""
    if accuracies := [scores["accuracy"] for scores in one.groups.values() if "accuracy" in scores]:
        return math.fsum(accuracies) / len(accuracies)
    return one.scored[-1].groups_accuracy if one.scored else None


def _groups_quantile(one: TrialResult, which: Literal["least", "p10"]) -> float | None:
    """Of the last model's accuracies over those that `_groups_mean` is the mean of."""
    if found := quantiles(one.groups.items()).get("accuracy"):
        return found.least if which == "least" else found.p10
    return _quantile_in(one.scored[-1], which) if one.scored else None


def _quantile_in(row: Row, which: Literal["least", "p10"]) -> float | None:
    measured = row.groups_quantiles.get("accuracy")
    return None if measured is None else float(measured[which])


def _late_groups(one: TrialResult, of: Callable[[Row], float | None]) -> float | None:
    """The mean over the second half of the measured models."""
    values = [value for row in _late(one) if (value := of(row)) is not None]
    return math.fsum(values) / len(values) if values else None


def _estimated(values: Iterable[float | None]) -> Estimate | None:
    """Over the seeds that have a value."""
    return Estimate.of([one for one in values if one is not None])


def _late(one: TrialResult) -> list[Row]:
    scored = one.scored
    return scored[len(scored) // 2 :]


def _best(one: TrialResult) -> float | None:
    """The best accuracy; None if none was measured."""
    return max((row.accuracy for row in one.scored if row.accuracy is not None), default=None)


def _mean(rows: Sequence[Row], name: Literal["accuracy", "loss"]) -> float | None:
    """None without a value."""
    values = [value for row in rows if (value := getattr(row, name)) is not None]
    return math.fsum(values) / len(values) if values else None


def _wasted(one: TrialResult) -> float:
    busy_s = math.fsum(row.busy_s for row in one.rows)
    return math.fsum(row.wasted_s for row in one.rows) / busy_s if busy_s else 0.0


def _by_group(group: Sequence[TrialResult]) -> dict[str, Estimate]:
    names = dict.fromkeys(name for one in group for name in one.groups)
    found = {
        name: Estimate.of([one.groups[name]["accuracy"] for one in group if "accuracy" in one.groups.get(name, {})])
        for name in names
    }
    return {name: estimate for name, estimate in found.items() if estimate is not None}
