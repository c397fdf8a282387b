"""The exact sum of a round's updates as integers, and the public grid on which float32 updates become integers.

Integer addition is associative and commutative, so any arrival order, any number of partial sums and any replay give
the same bits. Memory is one int64 vector, twice the float32 model, however many clients report. The codec defines what
the integers stand for, and their mean (`update_codec.py`). For float32 updates the integers are those of a grid:

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

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from umbel.aggregation.errors import LyingLength, NonFiniteUpdate, UpdateOutOfRange
from umbel.aggregation.kernels.kernels import add_levels
from umbel.aggregation.model.layout import PIECE_VALUES
from umbel.aggregation.model.state import Places
from umbel.aggregation.plans.codec import Grid

_HASHED_VALUES = 1 << 20  # at a time


class IntegerSum:
    """A sum of `n_sums` coordinates. Not thread-safe.

    The caller must ensure that no coordinate times `total_weight_max` exceeds 2^62. Values of `counted` are added once,
    whatever the weight.
    """

    def __init__(self, n_sums: int, total_weight_max: int, counted: Places | None = None) -> None:
        self.n_sums = n_sums
        self._counted = counted if counted is not None and counted.n_values else None
        self.total_weight_max = total_weight_max
        self.total_weight = 0
        self.n_folded = 0
        self._sum = torch.zeros(n_sums, dtype=torch.int64)

    def add(self, chunks: Iterable[Tensor], weight: int) -> None:
        """Add `weight` times an update, given as consecutive chunks of `n_sums` integers in all.

        Raises `ValueError` for a weight below 1 or a total above `total_weight_max`, `LyingLength` for a wrong number
        of integers. After an error the sum is undefined: build a new one from the stored updates.
        """
        self._add_weight(weight)
        self._add_all(chunks, weight)
        self.n_folded += 1

    def merge_sums(self, pieces: Iterable[Tensor], total_weight: int, n_folded: int) -> None:
        """Add another partial sum of the same round, given as its `sums` in consecutive int64 pieces.

        Gives the same bits as adding its updates here. Raises `ValueError` for a total weight above the bound and
        `LyingLength` for a wrong number of integers; then the sum is undefined.
        """
        self._add_weight(total_weight, least=0)
        self._add_all(pieces, 1)
        self.n_folded += n_folded

    @property
    def sums(self) -> Tensor:
        """The integers: int64, `n_sums`, read-only."""
        return self._sum

    def _add_all(self, pieces: Iterable[Tensor], weight: int) -> None:
        offset = 0
        for piece in pieces:
            end = offset + piece.numel()
            if end > self.n_sums:
                raise LyingLength(f"the update has more integers than the sum, which has {self.n_sums}")
            add_levels(self._sum[offset:end], piece, weight)
            if self._counted is not None and weight > 1:
                for _, here in self._counted.within(offset, piece.numel()):
                    self._sum[offset:end][here] -= piece[here].to(torch.int64) * (weight - 1)
            offset = end
        if offset != self.n_sums:
            raise LyingLength(f"the update has {offset} integers, but the sum has {self.n_sums}")

    def _add_weight(self, weight: int, least: int = 1) -> None:
        total = self.total_weight + weight
        if weight < least or total > self.total_weight_max:
            raise ValueError(
                f"the weight {weight} would make the total weight {total}; a weight must be at least {least}, and the "
                f"total at most {self.total_weight_max}"
            )
        self.total_weight = total


def sum_sha256(total: IntegerSum) -> str:
    """The SHA-256 of a sum's integers as int64, little-endian, in hex. Audit bundles have it."""
    return integers_sha256(total.sums)


def integers_sha256(*vectors: Tensor) -> str:
    """The SHA-256 of these integers, one vector after the other, as int64, little-endian, in hex."""
    sha = hashlib.sha256()
    for vector in vectors:
        for part in torch.split(vector, _HASHED_VALUES):
            sha.update(part.to(torch.int64).numpy().astype("<i8", copy=False).data)
    return sha.hexdigest()


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
    bounds: list[float] = torch.stack(values.aminmax()).tolist()  # at once: a GPU ends its work before each answer
    low, high = bounds
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

    def __init__(self, n_values: int, grid: Grid, counted: Places | None = None) -> None:
        super().__init__(n_values, grid.total_weight_max, counted)
        self.grid = grid

    def fold(self, pieces: Iterable[Tensor], weight: int) -> None:
        """`add` an update, given as consecutive float32 pieces."""
        self.add((to_integers(piece, self.grid) for piece in pieces), weight)

    def fold_vector(self, vector: Tensor, weight: int) -> None:
        """Check and fold a whole float32 vector; a refused one changes nothing."""
        if vector.numel() != self.n_sums:
            raise LyingLength(f"the update has {vector.numel()} values, but the model's layout has {self.n_sums}")
        check_values(vector, self.grid)
        self.fold(torch.split(vector, PIECE_VALUES), weight)

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """The weighted mean of coordinates `start` to `stop`, float64; of counted values, the sum.

        Raises `ValueError` if nothing was folded.
        """
        if self.total_weight == 0:
            raise ValueError("no update was added, so there is no mean")
        total = self._sum[start:stop].to(torch.float64).mul_(self.grid.step)
        mean = total / self.total_weight if self._counted is not None else total.div_(self.total_weight)
        if self._counted is not None:
            for _, here in self._counted.within(start, stop - start):
                mean[here] = total[here]
        return mean
