"""The integer grid: uncompressed updates become integers, and integers sum exactly.

A round publishes one step D, a power of two. A client's float32 weight change x becomes k = round(x / D), and the
round's result is

    mean = D * (sum_i w_i k_i) / (sum_i w_i),        w_i integer weights

The sum runs in int64 and cannot overflow: D is the finest power of two for which

    (max_abs / D) * total_weight_max <= 2^62,

where `max_abs` bounds every coordinate and `total_weight_max` bounds the sum of all weights of the round. (A grid
coarser than float32 itself is at `max_abs` is refused: total_weight_max <= 2^38.) Integer addition is associative and
commutative, so any arrival order, any number of partial sums and any replay give the same bits. The mean is taken in
float64, in one fixed order: the sum rounded once, the quotient once.

Rounding to nearest costs at most D/2 per coordinate and client: with 300 clients of at most 2^20 samples and
max_abs = 64, D = 2^-27 = 7.5e-9.

Memory is one int64 vector, twice the float32 model, however many clients report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from umbel.aggregation.errors import LyingLength, NonFiniteUpdate, UpdateOutOfRange
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

_SUM_BITS = 62
TOTAL_WEIGHT_MAX = 1 << 38  # step <= 2^-24 max_abs: as fine as float32 is there; also exact as a float64
MAX_ABS_LEAST, MAX_ABS_MOST = 2.0**-64, 2.0**64  # far beyond any weight change; keeps every step a normal float64
CHUNK_VALUES = 1 << 17  # 128 Ki values: 1 MiB of float64 scratch stays in the second-level cache


@dataclass(frozen=True, slots=True)
class Grid:
    """The public grid of a round.

    `step`: D, a power of two, in the units of the weights. `max_abs`: greatest absolute value of one coordinate of a
    weight change. `total_weight_max`: greatest sum of weights that one round may fold.
    """

    step: float
    max_abs: float
    total_weight_max: int

    def __post_init__(self) -> None:
        _require_bounds(self.max_abs, self.total_weight_max)
        if not (math.isfinite(self.step) and self.step > 0 and math.frexp(self.step)[0] == 0.5):
            raise ValueError(f"step must be a power of two, not {self.step}")
        if Fraction(self.max_abs) * self.total_weight_max > Fraction(self.step) * (1 << _SUM_BITS):
            raise ValueError("this grid could overflow 63 bits: take a larger step")

    @classmethod
    def finest(cls, *, max_abs: float, total_weight_max: int) -> Grid:
        """The grid with the smallest step whose sums cannot overflow."""
        _require_bounds(max_abs, total_weight_max)
        numerator, denominator = max_abs.as_integer_ratio()  # the denominator of a float is a power of two
        ceiling_bits = (numerator * total_weight_max - 1).bit_length()
        exponent = ceiling_bits - (denominator.bit_length() - 1) - _SUM_BITS
        return cls(math.ldexp(1.0, exponent), max_abs, total_weight_max)


def check_values(values: Tensor, grid: Grid, first: int = 0) -> None:
    """Refuse what cannot stand on the grid.

    `values`: float32, one dimension, any device; `first` is the index of `values[0]` in the whole update.
    Raises `NonFiniteUpdate` or `UpdateOutOfRange`, naming the first offender.
    """
    if values.numel() == 0:
        return
    low, high = (bound.item() for bound in values.aminmax())
    if math.isfinite(low) and math.isfinite(high):
        if max(-low, high) <= grid.max_abs:
            return
        bad = int((values.to(torch.float64).abs() > grid.max_abs).nonzero()[0].item())  # max_abs may be no float32
        raise UpdateOutOfRange(
            f"value {first + bad} of the update is {values[bad].item():g}, beyond the grid's max_abs {grid.max_abs:g}; "
            "train with a smaller learning rate or raise max_abs in the run file"
        )
    bad = int((~values.isfinite()).nonzero()[0].item())
    raise NonFiniteUpdate(
        f"value {first + bad} of the update is {values[bad].item()}; the training diverged, so nothing was folded"
    )


def to_integers(values: Tensor, grid: Grid) -> Tensor:
    """float32 values -> int64 grid indices round(x / D), half to even.

    Exact up to that rounding: dividing a float32 by a power of two is exact in float64.
    """
    return values.to(torch.float64).div_(grid.step).round_().to(torch.int64)


class GridAccumulator:
    """The exact weighted sum of a round's updates: one int64 vector and the sum of weights.

    Not thread-safe; updates must have passed `check_values` before they are folded.
    """

    def __init__(self, n_values: int, grid: Grid) -> None:
        self.grid = grid
        self.n_values = n_values
        self.total_weight = 0
        self.n_folded = 0
        self._sum = torch.zeros(n_values, dtype=torch.int64)

    def fold(self, chunks: Iterable[Tensor], weight: int) -> None:
        """Add `weight` times an update, given as consecutive float32 chunks that together hold `n_values` values.

        Raises `ValueError` for a weight below 1 or a total above the grid's bound, `LyingLength` for a wrong number of
        values. After an error in mid-update the sum is undefined: build a new accumulator from what is stored.
        """
        self._add_weight(weight)
        offset = 0
        for chunk in chunks:
            end = offset + chunk.numel()
            if end > self.n_values:
                raise LyingLength(f"the update holds more than the {self.n_values} values of the layout")
            self._sum[offset:end].add_(to_integers(chunk, self.grid), alpha=weight)
            offset = end
        if offset != self.n_values:
            raise LyingLength(f"the update holds {offset} values, the layout {self.n_values}")
        self.n_folded += 1

    def fold_vector(self, vector: Tensor, weight: int) -> None:
        """Check and fold a whole float32 vector of `n_values` values; a refused one changes nothing."""
        if vector.numel() != self.n_values:
            raise LyingLength(f"the update holds {vector.numel()} values, the layout {self.n_values}")
        check_values(vector, self.grid)
        self.fold(torch.split(vector, CHUNK_VALUES), weight)

    def merge(self, other: GridAccumulator) -> None:
        """Add another partial sum of the same round: the same bits as folding its updates here.

        Raises `ValueError` for a sum of another round, or a total weight above the grid's bound.
        """
        if other.grid != self.grid or other.n_values != self.n_values:
            raise ValueError("partial sums of different rounds cannot be merged")
        self._add_weight(other.total_weight, least=0)
        self._sum.add_(other._sum)
        self.n_folded += other.n_folded

    def merge_sums(self, pieces: Iterable[Tensor], total_weight: int, n_folded: int) -> None:
        """Add another partial sum of the same round, given as its `sums` in consecutive int64 pieces.

        Raises `ValueError` for a total weight above the grid's bound, `LyingLength` for a wrong number of values; the
        sum is undefined then.
        """
        self._add_weight(total_weight, least=0)
        offset = 0
        for piece in pieces:
            end = offset + piece.numel()
            if end > self.n_values:
                raise LyingLength(f"the partial sum holds more than the {self.n_values} values of the layout")
            self._sum[offset:end].add_(piece)
            offset = end
        if offset != self.n_values:
            raise LyingLength(f"the partial sum holds {offset} values, the layout {self.n_values}")
        self.n_folded += n_folded

    @property
    def sums(self) -> Tensor:
        """The integers behind the mean: int64, `n_values` of them, to read only."""
        return self._sum

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """The weighted mean of coordinates `start` to `stop`, float64. Raises `ValueError` if nothing was folded."""
        if self.total_weight == 0:
            raise ValueError("nothing was folded, so there is no mean")
        return self._sum[start:stop].to(torch.float64).mul_(self.grid.step).div_(self.total_weight)

    def _add_weight(self, weight: int, least: int = 1) -> None:
        total = self.total_weight + weight
        if weight < least or total > self.grid.total_weight_max:
            raise ValueError(f"weight {weight} takes the total to {total}, allowed: 1 to {self.grid.total_weight_max}")
        self.total_weight = total


def _require_bounds(max_abs: float, total_weight_max: int) -> None:
    if not MAX_ABS_LEAST <= max_abs <= MAX_ABS_MOST:  # also refuses a NaN
        raise ValueError(f"max_abs must lie between 2^-64 and 2^64, not {max_abs}")
    if not 1 <= total_weight_max <= TOTAL_WEIGHT_MAX:
        raise ValueError(
            f"the weights of a round may sum to between 1 and 2^38, not {total_weight_max}: "
            "lower sample_count_max or the number of clients asked"
        )
