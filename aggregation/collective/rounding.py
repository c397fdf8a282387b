"""Rotated vectors as bytes: a few bits for each value, and one factor for each vector.

A rotated vector looks Gaussian (`kernels/rotation.py`), so one uniform grid suits all vectors: 2^bits levels half a
step off zero, with the step that loses least (Max, Quantizing for minimum distortion, 1960; table II has those of up to
5 bits). Each value y is rounded to the nearest level q. The factor c is:

- without feedback c = ||y||^2 / <y, q>. Then the mean over random rotations is the vector itself (Vargaftik et al.,
  EDEN, 2022, theorem 1).
- with feedback c = <y, q> / <q, q>, which makes the error least.

Nothing is read back from a device. A vector with a value that is not finite gets a factor that is NaN. There are few
passes over the values, because at 100 Mbit/s a pass takes about as long as a quarter of a bit on its way.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = {2: 0.9957, 4: 0.3352, 8: 0.0308}
"""By bits: the step, in standard deviations."""
_UNBIASED_BITS = 4  # from here on the bias of a second rounding is small without feedback
_FACTOR_BYTES = 4  # of a float32
_ALIGNED = 64  # values in a row are a multiple of this, so that its bytes and factor are aligned


@dataclass(frozen=True, slots=True)
class Rounding:
    """Raises `ValueError` for bits that have no step, or so few that they need feedback."""

    bits: int
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.bits not in STEPS:
            raise ValueError(f"bits must be one of {', '.join(map(str, STEPS))}, not {self.bits}")
        if self.bits < _UNBIASED_BITS and not self.feedback:
            raise ValueError(f"{self.bits} bits need error feedback; without it take {_UNBIASED_BITS} bits or more")

    def rounded(self, rows: Tensor, n_used: Tensor) -> Tensor:
        """Each row as bytes: float32 (k, n) -> uint8 (k, `n_bytes(n)`). `n` must be of `whole_row`.

        `n_used`: int64 (k,), on the device of the rows: the values of each row that count. After them come zeros.
        """
        half = 1 << self.bits - 1
        squares = _dot(rows, rows)
        rms = (squares / n_used.clamp(min=1)).sqrt_()
        scale = torch.where(rms > 0, 1 / (rms * STEPS[self.bits]), 0.0)
        levels = (rows * scale.unsqueeze(1)).floor_().clamp_(-half, half - 1)
        with_grid = _dot(rows, levels) + 0.5 * rows.sum(1)  # of the levels, which are at l + 1/2
        if self.feedback:
            n_zeros = rows.shape[1] - n_used  # their level is 0
            of_grid = _dot(levels, levels) + levels.sum(1) + 0.25 * (rows.shape[1] - n_zeros)
            factors = with_grid / of_grid.clamp(min=0.25)
        else:
            factors = (squares / with_grid).nan_to_num_(0.0)
        factors = torch.where(rms.isfinite(), factors, math.nan)
        return torch.cat([packed(levels.to(torch.int8), self.bits), factors.unsqueeze(1).view(torch.uint8)], dim=1)

    def values(self, data: Tensor) -> Tensor:
        """The inverse of `rounded`, up to what rounding leaves out: uint8 (k, `n_bytes(n)`) -> float32 (k, n)."""
        grid, factors = data[:, :-_FACTOR_BYTES], data[:, -_FACTOR_BYTES:].contiguous().view(torch.float32)
        levels = unpacked(grid.contiguous().view(torch.int8), self.bits)
        return levels.to(torch.float32).add_(0.5).mul_(factors)

    def n_bytes(self, n: int) -> int:
        """The bytes of a row of `n` values."""
        return n * self.bits // 8 + _FACTOR_BYTES


def packed(levels: Tensor, bits: int) -> Tensor:
    """int8 (k, n) -> uint8 (k, n bits / 8): a byte has values of as many equal slices of the row."""
    slices = levels.view(torch.uint8).chunk(8 // bits, dim=1)
    if len(slices) == 1:
        return slices[0]
    mask, found = (1 << bits) - 1, slices[-1] << (8 - bits)
    for place, one in enumerate(slices[:-1]):
        found |= (one & mask) << (place * bits)
    return found


def unpacked(data: Tensor, bits: int) -> Tensor:
    """The inverse of `packed`, from its bytes as int8 (k, n bits / 8)."""
    places = range(0, 8, bits)
    if len(places) == 1:
        return data
    return torch.cat([(data << (8 - bits - place)) >> (8 - bits) for place in places], dim=1)


def whole_row(n: int) -> int:
    """The least length of a row that has room for `n` values."""
    return -(-n // _ALIGNED) * _ALIGNED


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """The inner product of each pair of rows: (k, n), (k, n) -> (k,). (A matrix product is ten times slower.)"""
    return torch.stack([torch.dot(*pair) for pair in zip(left, right, strict=True)])
