"""When a run reaches its target accuracy."""

from collections.abc import Iterable
from dataclasses import dataclass

from umbel.sim.federation.rows import Row


@dataclass(frozen=True, slots=True)
class TargetReached:
    """How a run reached its target accuracy."""

    rounds: float  # by the best accuracy so far, interpolated between the measured models
    row: Row  # of the first measured model with this accuracy
    bytes_up: int  # uploaded by the end of this row


def reaching(rows: Iterable[Row], target: float) -> TargetReached | None:
    """How these rows of one run reach the accuracy `target`; None if they never do.

    The number of rounds follows McMahan et al. 2017 ("Communication-Efficient Learning of Deep Networks from
    Decentralized Data", section 3): take the best accuracy so far after each measured model, draw straight lines
    between these points, and read where the curve crosses the target. The first measured model has no point before it,
    so its round counts whole.
    """
    before: tuple[int, float] | None = None  # the last measured round, and the best accuracy so far
    n_bytes = 0
    for row in rows:
        n_bytes += row.bytes_up
        if row.accuracy is None:
            continue
        if row.accuracy >= target:
            return TargetReached(_crossing(before, row.round, row.accuracy, target), row, n_bytes)
        before = (row.round, row.accuracy if before is None else max(before[1], row.accuracy))
    return None


def _crossing(before: tuple[int, float] | None, round_: int, accuracy: float, target: float) -> float:
    """Where the line from `before` to this model crosses `target`, in rounds."""
    if before is None:
        return float(round_)
    earlier, best = before
    return earlier + (round_ - earlier) * (target - best) / (accuracy - best)
