"""Updates clipped, rotated and rounded to integers of a fixed width, and the mean of many from the sum of integers.

    y = rotate(x min(1, C / ||x||));    k = floor(y / D + u + phi);    mean = unrotate((sum of k - S(u)) D / n)

C is the clip norm, D the step, u + phi the cohort's dither, and S(u) what the dithers of these n clients have added
(`quantize.py`). All of these are public. The sum of the integers is exact. It is formed modulo 2^m (`modular.py`) or in
the lanes of an all-reduce (`lanes.py`). The rotation is undone once, on the sum.

**A secret dither.** Where a sum must hide whose levels are in it, the dither must be secret: with a public one, anyone
can tell whose levels are in a sum of few (docs/decisions, 16). So each client draws its own uniform dither
(`levels_with`). Nothing is subtracted from the sum (`plain_mean`), because E[k] is y / D, rounded to 2^-16. The squared
error is twice that of a shared dither.

**Unbiased** except for clipping, **linear**, stateless. A vector may have any length, so more values can follow the
weights. One client's error is about D^2 / 12 for each coordinate, whatever the update was; that of the mean is n times
less. Values beyond 32,766 steps are cut to that.

From the sum onwards: the dither is subtracted and the sum divided in float64, then rounded once to float32 and rotated
back by the float32 kernels. On Gaussian values that adds 9e-15 to the relative squared error, as much as the rotation
before it; 8 bits of levels have 2e-5 of their own. Rotating back in float64 takes twenty times as long. Every device
computes the same bits.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from umbel.aggregation.kernels.arguments import Blocks, Levels, Quantizer, phase
from umbel.aggregation.kernels.kernels import TILE, dither_into, quantize_into, rotate_into, unrotate_into
from umbel.aggregation.kernels.quantize import Dithers, quantize
from umbel.aggregation.plans.codec import CodecPlan, as_float32
from umbel.aggregation.stated_order import norm
from umbel.aggregation.types import COHORT_MAX, NORM_MAX

_PART_CPU, _PART_DEVICE = 16 * TILE, 4096 * TILE  # a part that stays in a cache; one that keeps a device busy
_WHOLE = Levels()

Dither: TypeAlias = Callable[[int, int], Tensor]
"""From the first position and the length of a part to its dither: int32, 0 to 65,535, on the CPU."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """A rotation and a step for vectors of `n_values`, the same for a whole cohort.

    Both the signs of the rotation and the dither come from the plan's key.
    """

    plan: CodecPlan
    n_values: int

    def __post_init__(self) -> None:
        if self.n_values < 0 or not self.plan.inverse_step:
            raise ValueError("a rotation needs the plan of an integer codec, and n_values of at least 0")

    @property
    def blocks(self) -> Blocks:
        return Blocks.of(self.n_values)

    @property
    def n_levels(self) -> int:
        """The number of integers of a vector: `n_values`, padded to whole blocks."""
        return self.blocks.n_padded

    def quantizer(self, values: Tensor, rank: int, levels: Levels = _WHOLE) -> Quantizer:
        """The quantizer of `values` (float32, any device) for the client with this rank. Its step includes clipping.

        Raises `ValueError` for values that are not finite, or of a norm above 2^60, or not `n_values`.
        """
        if not 0 <= rank < COHORT_MAX:
            raise ValueError(f"rank must lie between 0 and {COHORT_MAX - 1}, not {rank}")
        return Quantizer(self._inverse_step(values), self.plan.key, phase(rank), levels)

    def levels(self, values: Tensor, rank: int, levels: Levels = _WHOLE) -> Iterator[Tensor]:
        """The integers of the rotated vector in consecutive parts, int32, each a new tensor on the device of `values`.

        Raises `ValueError` as `quantizer` does.
        """
        quantizer = self.quantizer(values, rank, levels)
        for rotated, first in self._rotated(values):
            out = torch.empty(rotated.numel(), dtype=torch.int32, device=values.device)
            quantize_into(out, rotated, quantizer, first)
            yield out

    def levels_with(self, values: Tensor, dither: Dither) -> Iterator[Tensor]:
        """`levels`, rounded with the client's own dither.

        Raises `ValueError` for values that are not finite, or of a norm above 2^60, or not `n_values` float32.
        """
        inverse_step = self._inverse_step(values)
        for rotated, first in self._rotated(values):
            yield quantize(rotated, inverse_step, dither(first, rotated.numel()).to(values.device), 0, _WHOLE)

    def _inverse_step(self, values: Tensor) -> float:
        """The factor of `values` before rounding, including the clipping. Raises `ValueError`."""
        if values.dtype != torch.float32 or values.shape != (self.n_values,):
            raise ValueError(
                f"the weight change must have shape [{self.n_values}] and type {torch.float32}, but has shape "
                f"{list(values.shape)} and type {values.dtype}"
            )
        found = self._norm(values)
        if not found <= NORM_MAX:
            raise ValueError(
                f"the norm of the weight change must be at most {NORM_MAX:g}, not {found}; train with a lower learning "
                "rate"
            )
        return as_float32(self.plan.inverse_step * self.plan.scale(found))

    def _rotated(self, values: Tensor) -> Iterator[tuple[Tensor, int]]:
        """The rotated vector in consecutive parts with their first positions. Each part overwrites the one before."""
        buffer = values.new_empty(min(_part(values), self.n_levels))
        for first, length in self.parts(values):
            rotate_into(buffer[:length], values, self.blocks, self.plan.key, first)
            yield buffer[:length], first

    def _norm(self, values: Tensor) -> float:
        """The L2 norm. It is summed in a stated order if it decides the step.

        Otherwise it only shows whether the values can be rounded, and a library's norm is ten times as fast.
        """
        if self.plan.clip_norm is not None:
            return norm(values)
        return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in torch.split(values, _part(values))))

    def parts(self, like: Tensor) -> Iterator[tuple[int, int]]:
        """First position and length of each part of a vector on this device."""
        size = _part(like)
        return ((first, min(size, self.n_levels - first)) for first in range(0, self.n_levels, size))

    def mean(self, sums: Iterable[Tensor], dithers: Dithers) -> Tensor:
        """The mean of the updates whose integers were summed: float32, `n_values`, on the device of `sums`.

        `sums`: consecutive parts as in `parts`, of any integer type. `dithers`: of the clients in the sum
        (`dithers_of`). Raises `ValueError` for sums of another length.
        """

        def undithered(part: Tensor, first: int) -> Tensor:
            shared = torch.empty(part.numel(), dtype=torch.int32, device=part.device)
            dither_into(shared, self.plan.key, first)
            return dithers.subtract(part, shared)

        return self._mean(sums, undithered, dithers.total_weight)

    def plain_mean(self, sums: Iterable[Tensor], n_clients: int) -> Tensor:
        """`mean` of clients that each used their own dither (`levels_with`)."""
        return self._mean(sums, lambda part, _first: part.to(torch.float64), n_clients)

    def _mean(self, sums: Iterable[Tensor], steps_of: Callable[[Tensor, int], Tensor], total_weight: int) -> Tensor:
        """`steps_of` maps a part of the sum and its first position to the sum of y / D: float64, a new tensor."""
        out, first = None, 0
        for part in sums:
            if out is None:
                out = torch.empty(self.n_values, dtype=torch.float32, device=part.device)
            mean = steps_of(part, first).div_(total_weight * self.plan.inverse_step)
            unrotate_into(out, mean.to(torch.float32), self.blocks, self.plan.key, first)
            first += part.numel()
        if out is None or first != self.n_levels:
            raise ValueError(f"a sum must have {self.n_levels} integers, not {first}")
        return out


def dithers_of(ranks: Iterable[int]) -> Dithers:
    """What the dithers of these clients add to the sum of their levels. Raises `ValueError` for a repeated rank."""
    phases = [phase(rank) for rank in ranks]
    if not phases or len(set(phases)) < len(phases):
        raise ValueError("a sum must have at least one client, and each rank only once")
    return Dithers(((1, phi) for phi in phases), _WHOLE)


def sum_of_squares(sums: Tensor) -> int:
    """The exact sum of squares of at most 2^32 integers in the range of int32."""
    squares = sums.to(torch.int64).square()
    low, high = squares & ((1 << 31) - 1), squares >> 31
    return int(low.sum()) + (int(high.sum()) << 31)


def _part(like: Tensor) -> int:
    return _PART_CPU if like.device.type == "cpu" else _PART_DEVICE
