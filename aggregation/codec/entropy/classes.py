"""Classes of an update's values: values of similar energy and dither are coded together.

The weights of a layer do not all change alike: rows of dead units and columns of unused inputs hardly move. A gradient
of a linear layer is a sum of outer products, so the energy of a value is close to its row's times its column's. So a
tensor is read as a matrix, and a client sends a byte for each row and column. These give the *energy* of each value, 0
to 15, in octaves. Compared with one distribution for all values, this saves a third of the bits of real updates, and
costs 0.02 bits a value.

Both ends also know the dither d of each value. Where |x| is below a step, k = floor(x / D + d) is 0 or 1 if d is near
1, and 0 or -1 if it is near 0. Since P(k | d) = P(-k | 1 - d) for symmetric x, values with d of a half and more are
*mirrored* (-k for k and 1 - d for d; in fixed point exactly, with ~f for f). For quiet values it pays to separate d
below and above a quarter.

A matrix is `shape[0]` rows if there are at least 16, of at least 16 values each; other tensors are rows of 256 values,
the last one shorter.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.entropy_kernels import mix_dither_into
from umbel.aggregation.errors import MalformedUpdate
from umbel.aggregation.kernels.arguments import UNIT
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.types import LEVEL_MAX

ENERGY_BYTE_MAX = 127
_SIDE_MIN, _FLAT_WIDTH = 16, 256
_ENERGIES, _IN_OCTAVE = 16, 2
_ZERO = 64  # the sum of a row's byte and a column's that stands for energy 0
_LEAST = 2.0**-5  # the mean |k| at energy 0
_NEUTRAL = 32  # the byte of a column with the tensor's mean
_QUARTER_BELOW, _THREE_QUARTERS_BELOW = 0.8408964152537145, 0.5946035575013605  # of an octave below 1: 2^-1/4, 2^-3/4


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor as rows of `width` values, the last one shorter."""

    offset: int
    n_values: int
    width: int
    first_byte: int  # of its rows' energy bytes; its columns' bytes follow

    @property
    def n_rows(self) -> int:
        return -(-self.n_values // self.width)

    @property
    def rows(self) -> slice:
        return slice(self.first_byte, self.first_byte + self.n_rows)

    @property
    def columns(self) -> slice:
        return slice(self.rows.stop, self.rows.stop + self.width)


@dataclass(frozen=True, slots=True)
class Patch:
    """A rectangle of a matrix."""

    matrix: Matrix
    rows: slice
    columns: slice
    place: slice  # of its values in the requested part of the vector


class Matrices:
    """The tensors of a layout as matrices. `n_bytes`: the number of all their rows and columns."""

    def __init__(self, layout: Layout) -> None:
        self._matrices: list[Matrix] = []
        self.n_bytes = 0
        for spec in layout.owners():
            if spec.n_values:
                matrix = Matrix(spec.offset, spec.n_values, min(_width(spec), spec.n_values), self.n_bytes)
                self._matrices.append(matrix)
                self.n_bytes = matrix.columns.stop
        self._offsets = [matrix.offset for matrix in self._matrices]

    def __iter__(self) -> Iterator[Matrix]:
        return iter(self._matrices)

    def patches(self, first: int, n_values: int) -> Iterator[Patch]:
        """The patches of the coordinates from `first` on, in order: whole rows together, pieces of rows alone."""
        at, stop = first, first + n_values
        number = bisect_right(self._offsets, first) - 1
        while at < stop:
            matrix = self._matrices[number]
            end = min(stop, matrix.offset + matrix.n_values)
            while at < end:
                row, column = divmod(at - matrix.offset, matrix.width)
                n_rows = (end - at) // matrix.width if column == 0 else 0
                n_taken = n_rows * matrix.width or min(end - at, matrix.width - column)
                columns = slice(column, column + n_taken // max(n_rows, 1))
                yield Patch(matrix, slice(row, row + max(n_rows, 1)), columns, slice(at - first, at - first + n_taken))
                at += n_taken
            number += 1


class EnergyMeter:
    """Measures the rows and columns of a vector, in parts of at most 2^20 values.

    Sizes are rounded to 1/65,536 of a level and cut to 32,766 levels. So the sums are exact, in float64 for a part and
    in int64 for the vector, and every machine finds the same bytes.
    """

    def __init__(self, matrices: Matrices, levels_per_unit: float) -> None:
        self._matrices = matrices
        self._units = levels_per_unit * UNIT
        self._sums = torch.zeros(matrices.n_bytes, dtype=torch.int64)

    def add(self, first: int, values: Tensor) -> None:
        """float32, on any device: the vector's coordinates from `first` on."""
        self._sums = self._sums.to(values.device)  # all parts of a vector are on one device
        for patch in self._matrices.patches(first, values.numel()):
            n_rows = patch.rows.stop - patch.rows.start
            sizes = values[patch.place].view(n_rows, -1).abs().mul_(self._units).clamp_(max=LEVEL_MAX * UNIT).round_()
            self._sums[patch.matrix.rows][patch.rows] += sizes.sum(1, dtype=torch.float64).to(torch.int64)
            self._sums[patch.matrix.columns][patch.columns] += sizes.sum(0, dtype=torch.float64).to(torch.int64)

    def energies(self, scale: float = 1.0) -> Tensor:
        """The bytes of all rows and columns of `scale` times the vector, uint8, matrix by matrix, on the CPU."""
        made = torch.full((self._matrices.n_bytes,), _NEUTRAL, dtype=torch.uint8)
        sums = self._sums.cpu()
        for matrix in self._matrices:
            lengths = torch.full((matrix.n_rows,), matrix.width, dtype=torch.float64)
            lengths[-1] -= matrix.n_rows * matrix.width - matrix.n_values
            row_means = sums[matrix.rows].to(torch.float64) / lengths * (scale / (UNIT * _LEAST))
            made[matrix.rows] = _bytes_of(row_means, _ZERO - _NEUTRAL)
            if matrix.n_rows >= _SIDE_MIN:
                columns = sums[matrix.columns]
                mean = max(int(columns.sum()), 1) / matrix.width
                made[matrix.columns] = _bytes_of(columns.to(torch.float64) / mean, _NEUTRAL)
        return made


class Classes:
    """Computes the class byte of each value.

    It is the energy, 0 to 15, plus 16 if the energy is below 6 and the mirrored dither a quarter or more, plus 128 if
    the value is mirrored.
    """

    def __init__(self, matrices: Matrices, energies: Tensor | None, dither: tuple[int, int] | None) -> None:
        """`energies`: the bytes of rows and columns; None for energy 0 everywhere. `dither`: the cohort's key and the
        client's phi; None to mirror nothing. Raises `MalformedUpdate` for an energy byte above 127.
        """
        if energies is not None and energies.numel() and int(energies.max()) > ENERGY_BYTE_MAX:
            raise MalformedUpdate(
                f"the update states the energy byte {int(energies.max())} for a row or column of a tensor; at most "
                f"{ENERGY_BYTE_MAX} is allowed (docs/reference/wire.md)"
            )
        self._matrices = matrices
        self._energies = energies
        self._dither = dither

    def of(self, first: int, n_values: int) -> Tensor:
        """The class bytes of the coordinates from `first` on (a multiple of 128): uint8."""
        made = torch.zeros(n_values, dtype=torch.uint8)
        if self._energies is not None:
            for patch in self._matrices.patches(first, n_values):
                rows, columns = self._energies[patch.matrix.rows], self._energies[patch.matrix.columns]
                place = made[patch.place].view(patch.rows.stop - patch.rows.start, -1)
                torch.add(rows[patch.rows].unsqueeze(1), columns[patch.columns], out=place)
            made.clamp_(_ZERO, _ZERO + _IN_OCTAVE * _ENERGIES - 1).sub_(_ZERO).bitwise_right_shift_(1)
        if self._dither is not None:
            mix_dither_into(made, *self._dither, first)
        return made


def _width(spec: TensorSpec) -> int:
    n_rows = spec.shape[0] if spec.shape else 1
    width = spec.n_values // n_rows
    return width if min(n_rows, width) >= _SIDE_MIN else _FLAT_WIDTH


def _bytes_of(ratios: Tensor, zero: int) -> Tensor:
    """Ratios to the nearest half octave: float64 -> uint8, with `zero` for 1.

    It compares, because libraries' logarithms differ.
    """
    mantissas, exponents = torch.frexp(ratios.clamp(2.0**-60, 2.0**60))  # 1/2 <= mantissa < 1
    below = (mantissas < _QUARTER_BELOW).to(torch.int32) + (mantissas < _THREE_QUARTERS_BELOW)
    return (exponents * _IN_OCTAVE - below + zero).clamp_(0, ENERGY_BYTE_MAX).to(torch.uint8)
