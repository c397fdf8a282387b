"""What an experiment has shown: its runs, and over their seeds the mean of what counts with how sure it is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.sim.experiments.rows import Row
from umbel.sim.experiments.trials import TrialResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and the bounds of the 95 % confidence interval about it (Student's t; Student 1908). Of one
    seed nothing is known but itself: the bounds are None.
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate | None":
        """None of no values."""
        n = len(values)
        if not n:
            return None
        mean = math.fsum(values) / n
        if n == 1:
            return cls(mean, None, None, 1)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
        half = _student_t(n - 1) * deviation / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)


def _student_t(degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, degrees))


@dataclass(frozen=True, slots=True)
class Point:
    """What is swept at one value, over all seeds. `rounds_to_target`, `hours_to_target`: of the seeds that reach it."""

    label: str
    values: Mapping[str, object]
    seeds: tuple[int, ...]
    accuracy: Estimate | None
    best_accuracy: Estimate | None
    loss: Estimate | None
    rounds: Estimate | None
    bytes_up: Estimate | None
    bytes_down: Estimate | None
    virtual_hours: Estimate | None
    wall_s: Estimate | None
    reached_target: int
    rounds_to_target: Estimate | None
    hours_to_target: Estimate | None
    bytes_up_to_target: Estimate | None


@dataclass(frozen=True, slots=True)
class Results:
    """`folder`: where rounds.jsonl, summary.json and the pictures are; None where nothing was written.

    In a notebook, showing this shows its picture.
    """

    name: str
    trials: tuple[TrialResult, ...]
    target_accuracy: float | None = None
    folder: Path | None = None

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row of every run, with its point and its seed: what `rounds.jsonl` holds."""
        for one in self.trials:
            for row in one.rows:
                yield {"point": one.trial.label, "seed": one.trial.seed, **asdict(row)}

    @property
    def points(self) -> tuple[Point, ...]:
        """In the order of the file's sweep."""
        return tuple(self._point(label, group) for label, group in self.by_point.items())

    @property
    def by_point(self) -> dict[str, list[TrialResult]]:
        """The runs by their point, of which each has one for every seed."""
        groups = dict[str, list[TrialResult]]()
        for one in self.trials:
            groups.setdefault(one.trial.label, []).append(one)
        return groups

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        runs = [
            {
                "point": one.trial.label,
                "seed": one.trial.seed,
                "status": one.status.value,
                "reason": one.reason,
                "model_sha256": one.model_sha256,
                "epsilon": one.epsilon,
                "engine": one.engine,
                "wall_s": round(one.wall_s, 3),
            }
            for one in self.trials
        ]
        points = [asdict(point) for point in self.points]
        return {"experiment": self.name, "target_accuracy": self.target_accuracy, "points": points, "runs": runs}

    def plot(self) -> "Figure":
        """The picture of it: accuracy over rounds, bytes and virtual time, and who took part."""
        from umbel.sim.experiments.plot import curves

        return curves(self)

    def _repr_png_(self) -> bytes:
        from io import BytesIO

        data = BytesIO()
        self.plot().savefig(data, format="png")
        return data.getvalue()

    def _point(self, label: str, group: Sequence[TrialResult]) -> Point:
        lasts = [one.scored[-1] for one in group if one.scored]
        reached = [found for one in group if (found := self._reaching(one)) is not None]
        return Point(
            label=label,
            values=group[0].trial.point,
            seeds=tuple(one.trial.seed for one in group),
            accuracy=Estimate.of([row.accuracy for row in lasts if row.accuracy is not None]),
            best_accuracy=Estimate.of([max(row.accuracy or 0.0 for row in one.scored) for one in group if one.scored]),
            loss=Estimate.of([row.loss for row in lasts if row.loss is not None]),
            rounds=Estimate.of([float(sum(row.makes_model for row in one.rows)) for one in group]),
            bytes_up=Estimate.of([float(sum(row.bytes_up for row in one.rows)) for one in group]),
            bytes_down=Estimate.of([float(sum(row.bytes_down for row in one.rows)) for one in group]),
            virtual_hours=Estimate.of([one.rows[-1].now_s / 3600 for one in group if one.rows]),
            wall_s=Estimate.of([one.wall_s for one in group]),
            reached_target=len(reached),
            rounds_to_target=Estimate.of([float(row.round) for row, _ in reached]),
            hours_to_target=Estimate.of([row.now_s / 3600 for row, _ in reached]),
            bytes_up_to_target=Estimate.of([float(n_bytes) for _, n_bytes in reached]),
        )

    def _reaching(self, one: TrialResult) -> tuple[Row, int] | None:
        """The first row with the target accuracy, and what was uploaded by then."""
        if self.target_accuracy is None:
            return None
        n_bytes = 0
        for row in one.rows:
            n_bytes += row.bytes_up
            if row.accuracy is not None and row.accuracy >= self.target_accuracy:
                return row, n_bytes
        return None
