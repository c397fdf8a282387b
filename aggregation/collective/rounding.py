"""Rotated vectors as bytes: a few bits for each value, and one factor for each vector.

A rotated vector looks Gaussian (`kernels/rotation.py`), so one uniform grid suits all vectors: 2^bits levels half a
step off zero, with the step that loses least (Max, Quantizing for minimum distortion, 1960; table II has those of up to
5 bits). Each value y is rounded to the nearest level q. The factor c is:

- without feedback c = ||y||^2 / <y, q>. Then the mean over random rotations is the vector itself (Vargaftik et al.,
  EDEN, 2022, theorem 1).
- with feedback c = <y, q> / <q, q>, which makes the error least.

Nothing is read back from a device. A vector with a value that is not finite gets a factor that is NaN.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.aggregation.kernels.packing import GROUP, pack, packed_bytes, unpack

STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041, 8: 0.0308}
"""By bits: the step, in standard deviations."""
_UNBIASED_BITS = 4  # from here on the bias of a second rounding is small without feedback
_FACTOR_BYTES = 4  # of a float32


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

    def rounded(self, parts: Tensor, is_used: Tensor) -> Tensor:
        """Each row as bytes: float32 (k, n) -> uint8 (k, `n_bytes(n)`). `is_used`: bool (k, n), the places that count.

        `n` must be a multiple of `packing.GROUP`.
        """
        half = 1 << self.bits - 1
        parts = parts.where(is_used, 0.0)
        rms = (parts.square().sum(1, keepdim=True) / is_used.sum(1, keepdim=True).clamp(min=1)).sqrt_()
        levels = (parts / (rms * STEPS[self.bits])).nan_to_num_(0.0).floor_().clamp_(-half, half - 1)
        grid = (levels + 0.5).where(is_used, 0.0)
        with_grid = (parts * grid).sum(1)
        if self.feedback:
            factors = with_grid / grid.square().sum(1).clamp(min=0.25)
        else:
            factors = (parts.square().sum(1) / with_grid).nan_to_num_(0.0)
        factors = torch.where(rms[:, 0].isfinite(), factors, math.nan)
        packed = pack(levels.reshape(-1).to(torch.int32), self.bits).view(len(parts), -1)
        return torch.cat([packed, factors.unsqueeze(1).contiguous().view(torch.uint8)], dim=1)

    def values(self, rows: Tensor) -> Tensor:
        """The inverse of `rounded`, up to what rounding leaves out: uint8 (k, `n_bytes(n)`) -> float32 (k, n)."""
        packed, factors = rows[:, :-_FACTOR_BYTES].contiguous(), rows[:, -_FACTOR_BYTES:].contiguous()
        n_part = packed.shape[1] * 8 // self.bits
        levels = unpack(packed.reshape(-1), len(rows) * n_part, self.bits).view(len(rows), n_part)
        return levels.to(torch.float32).add_(0.5).mul_(factors.view(torch.float32))

    def n_bytes(self, n: int) -> int:
        """The bytes of a row of `n` values."""
        return packed_bytes(n, self.bits) + _FACTOR_BYTES


def whole_groups(n: int) -> int:
    """The least number of values, at least `n`, that can be packed as a row."""
    return -(-n // GROUP) * GROUP
