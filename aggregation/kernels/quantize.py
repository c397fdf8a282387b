"""From float32 to integers: k = floor(y / D + dither), the same integers on every device.

The step D and the dither are public. The cohort shares u_j, and client i adds phi_i, the fractional part of i times the
golden ratio. Over a round's clients the sums u_j + phi_i are spread evenly over a step. So the mean has half the error
of independent stochastic rounding, and far less where the clients agree. For each client its own dither is
uniform, so E[k] = y / D. This is correlated quantization (Suresh, Sun, Ro, Yu, 2022), with an additive sequence in
place of its permutation. Since u and phi are known, their contribution is subtracted from the sum (`Dithers`). This
subtractive dither costs one table look-up per coordinate and round.

The arithmetic is fixed point with 16 bits of fraction, so that nothing depends on how a device rounds:

    a = round(y * inverse_step * 2^16)     one float32 product, an exact scaling, half to even
    k = (a + ((u + phi) mod 2^16) + offset) >> 16, cut to `low` .. `high`

The multiplication by 2^16 is exact, so E[k] = a / 2^16 exactly.
"""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.kernels.arguments import UNIT, Levels

_Integers: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float64]
_FIXED_MAX = float((1 << 31) - (1 << 17))


def quantize(values: Tensor, inverse_step: float, dither: Tensor, phi: int, levels: Levels) -> Tensor:
    """float32 `values` and int32 `dither` (both of one shape, any device) -> int32 levels.

    `inverse_step` must be a float32; `values` must be finite.
    """
    fixed = (values * inverse_step).mul_(float(UNIT)).clamp_(-_FIXED_MAX, _FIXED_MAX).round_().to(torch.int32)
    shifted = fixed.add_((dither + phi).bitwise_and_(UNIT - 1)).to(torch.int64).add_(levels.offset)
    return (shifted >> 16).clamp_(levels.low, levels.high).to(torch.int32)


class Dithers:
    """What the dither has added to a weighted sum of levels, for each of the 65,536 values of u."""

    def __init__(self, parts: Iterable[tuple[int, int]], levels: Levels) -> None:
        """`parts`: weight and phi of each client in the sum."""
        weights = np.zeros(UNIT, dtype=np.int64)
        total = 0
        for weight, phi in parts:
            weights[phi] += weight
            total += weight
        self.total_weight = total
        self._excess = torch.from_numpy(_excess(weights, levels.offset))

    def subtract(self, sums: Tensor, dither: Tensor) -> Tensor:
        """int64 sums of weight * k -> float64 sums of weight * y / D, unbiased. `dither`: int32, by coordinate."""
        excess = self._excess.to(sums.device)
        return sums.to(torch.float64).sub_(excess.index_select(0, dither))


def _excess(weights: _Integers, offset: int) -> _Floats:
    """For each u: the sum over clients of weight * ((u + phi) mod 2^16 - its mean + offset), in steps.

    The sum of weight * (u + phi) is linear in u, minus 2^16 times the weight of the clients that wrap around. It does
    not overflow int64, because weights sum to 2^38 at most.
    """
    u, total = np.arange(UNIT, dtype=np.int64), weights.sum()
    wrapped = np.concatenate([[0], np.cumsum(weights[::-1])])[:UNIT]  # for each u: the weight of phi >= 2^16 - u
    doubled = 2 * (u * total + (u * weights).sum() - UNIT * wrapped) - (UNIT - 1) * total + 2 * offset * total
    excess: _Floats = doubled.astype(np.float64) / (2 * UNIT)
    return excess
