"""Uncompressed updates as integers on the round's grid, and their exact weighted mean.

A round publishes one step D, a power of two. A client's float32 weight change x becomes k = round(x / D), and the
round's result is

    mean = D * (sum_i w_i k_i) / (sum_i w_i),        w_i integer weights

The sum runs in int64 and cannot overflow: D is the finest power of two for which

    (max_abs / D) * total_weight_max <= 2^62,

where `max_abs` bounds every coordinate and `total_weight_max` bounds the sum of all weights of the round. (A grid
coarser than float32 itself is at `max_abs` is refused: total_weight_max <= 2^38.) The mean is taken in float64, in one
fixed order: the sum rounded once, the quotient once.

Rounding to nearest costs at most D/2 per coordinate and client: with 300 clients of at most 2^20 samples and
max_abs = 64, D = 2^-27 = 7.5e-9.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from umbel.aggregation.errors import LyingLength, NonFiniteUpdate, UpdateOutOfRange
from umbel.aggregation.model.pieces import PIECE_VALUES
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.torch_later import torch
from umbel.aggregation.update.integer_sum import IntegerSum

if TYPE_CHECKING:
    from torch import Tensor


def check_values(values: Tensor, grid: Grid, first: int = 0) -> None:
    """Raise `NonFiniteUpdate` or `UpdateOutOfRange` for values beyond the grid, naming the first one.

    `values`: float32, one dimension, any device. `first`: the index of `values[0]` in the whole update.
    """
    if greatest(values, first) <= grid.max_abs:
        return
    bad = int((values.to(torch.float64).abs() > grid.max_abs).nonzero()[0].item())  # max_abs may be no float32
    raise UpdateOutOfRange(
        f"value {first + bad} of the update is {values[bad].item():g}, beyond the grid's max_abs {grid.max_abs:g}; "
        "train with a smaller learning rate or raise max_abs in the run file"
    )


def fitting(most_found: float, grid: Grid) -> tuple[float, float]:
    """A divisor and then a factor, both float32, that bring an update within `max_abs`. Both are 1 if it is already.

    `most_found`: the update's greatest absolute value, a float32.
    """
    most = torch.tensor(grid.max_abs, dtype=torch.float32)
    if float(most) > grid.max_abs:  # max_abs need not be a float32
        most = torch.nextafter(most, torch.tensor(0.0))
    return (most_found, float(most)) if most_found > grid.max_abs else (1.0, 1.0)


def greatest(values: Tensor, first: int) -> float:
    """The greatest absolute value, 0 without values. `first`: as in `check_values`. Raises `NonFiniteUpdate`."""
    if values.numel() == 0:
        return 0.0
    low, high = (bound.item() for bound in values.aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    bad = int((~values.isfinite()).nonzero()[0].item())
    raise NonFiniteUpdate(
        f"value {first + bad} of the update is {values[bad].item()}; the training diverged, so nothing was folded"
    )


def to_integers(values: Tensor, grid: Grid) -> Tensor:
    """float32 values -> int64 grid indices round(x / D), half to even.

    Exact up to that rounding: dividing a float32 by a power of two is exact in float64.
    """
    return values.to(torch.float64).div_(grid.step).round_().to(torch.int64)


class GridAccumulator(IntegerSum):
    """The exact weighted sum of updates on a grid, and its mean. Updates must have passed `check_values`."""

    def __init__(self, n_values: int, grid: Grid) -> None:
        super().__init__(n_values, grid.total_weight_max)
        self.grid = grid

    def fold(self, pieces: Iterable[Tensor], weight: int) -> None:
        """`add` an update, given as consecutive float32 pieces."""
        self.add((to_integers(piece, self.grid) for piece in pieces), weight)

    def fold_vector(self, vector: Tensor, weight: int) -> None:
        """Check and fold a whole float32 vector; a refused one changes nothing."""
        if vector.numel() != self.n_sums:
            raise LyingLength(f"the update holds {vector.numel()} values, the layout {self.n_sums}")
        check_values(vector, self.grid)
        self.fold(torch.split(vector, PIECE_VALUES), weight)

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """The weighted mean of coordinates `start` to `stop`, float64. Raises `ValueError` if nothing was folded."""
        if self.total_weight == 0:
            raise ValueError("nothing was folded, so there is no mean")
        return self._sum[start:stop].to(torch.float64).mul_(self.grid.step).div_(self.total_weight)
