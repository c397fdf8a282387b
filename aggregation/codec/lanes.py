"""A cohort's integers as tensors for an all-reduce: bytes modulo 256, or lanes with room for the sum.

Gloo and NCCL add int8, int32 and int64 with wrap-around (and no int16). Such a sum is exact and the same in any order,
so every rank decodes the same bits. This file makes the tensors only; the caller sends them. Levels are those of
`rotated.py`; a rank is a client.

- `ByteLanes`: each coordinate's level modulo 256, in a byte. Nothing is packed. The sum must stay within 128 levels, so
  the step grows with the sum: for n gradients that have nothing in common, D = 6 sqrt(n) / 128 rms, and an error of
  D^2 / 12, relative to the mean's square: 1.5e-3 at 8 ranks, 1.2e-2 at 64.
- `Lanes`: L bits of a word of 32 or 64 for each coordinate. A rank cuts its levels to -h .. h and sends k + h, where
  h = floor((2^L - 1) / 2n): n of them stay below 2^L, so no lane carries into the next. What is cut does not average
  out, so h should be four standard deviations of one rank's coordinates.

The step of the next sum comes from this one (`plan_after`). All ranks know the sum and take its size in integers, so
all of them come to the same step. If gradients have grown, the step is too fine, and the sums are wrong. But such sums
are no larger than 128 levels (or n h), so the next step is 3.4 times as large (or LANE_SIGMAS times, if every value was
cut).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.codec.rotated import Rotated, dithers_of, sum_of_squares
from umbel.aggregation.codec.step import SIGMAS
from umbel.aggregation.kernels.arguments import Levels
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.types import COHORT_MAX, LEVEL_MAX

BYTE_RANKS_MAX = 64
LANE_SIGMAS = 4.0
_BYTE = 8
_LEAST_LEVEL = 2  # with fewer, rounding alone fills the lanes, and the step would grow without end


class AllReduced(ABC):
    """Encodes the vectors of `n_ranks` as tensors, and decodes their sum.

    It has no state: use one for all sums of a plan.
    """

    def __init__(self, rotated: Rotated, n_ranks: int) -> None:
        self.rotated = rotated
        self.n_ranks = n_ranks
        self._dithers = dithers_of(range(n_ranks))

    @abstractmethod
    def encode(self, values: Tensor, rank: int) -> Tensor:
        """A new tensor on the device of `values` (float32, `rotated.n_values`), to be summed over all ranks.

        Raises `ValueError` for other values, for those that are not finite, and for an unknown rank.
        """

    @abstractmethod
    def sums(self, summed: Tensor) -> Iterator[Tensor]:
        """The exact sums of the ranks' levels in consecutive parts, int32 or int64.

        Raises `ValueError` for a tensor that is not such a sum.
        """

    def mean(self, summed: Tensor) -> Tensor:
        """The ranks' mean: float32, `rotated.n_values`. Raises `ValueError` as `sums` does."""
        return self.rotated.mean(self.sums(summed), self._dithers)

    def plan_after(self, summed: Tensor) -> CodecPlan:
        """The plan with the step for a next sum that is like this one. The caller must renew the plan's key."""
        plan = self.rotated.plan
        sigma = math.sqrt(sum(map(sum_of_squares, self.sums(summed))) / self.rotated.n_levels)
        return plan.at_step(sigma * self._steps_for_sigma / plan.inverse_step) if sigma else plan

    @property
    @abstractmethod
    def _steps_for_sigma(self) -> float:
        """The next step, in standard deviations of the sum."""

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.n_ranks:
            raise ValueError(f"rank must lie between 0 and {self.n_ranks - 1}, not {rank}")


class ByteLanes(AllReduced):
    """Levels modulo 256: int8, `rotated.n_levels`."""

    def __init__(self, rotated: Rotated, n_ranks: int) -> None:
        """Raises `ValueError` for more ranks than `BYTE_RANKS_MAX`, or none."""
        if not 1 <= n_ranks <= BYTE_RANKS_MAX:
            raise ValueError(f"n_ranks must lie between 1 and {BYTE_RANKS_MAX}, not {n_ranks}; use Lanes for more")
        super().__init__(rotated, n_ranks)

    def encode(self, values: Tensor, rank: int) -> Tensor:
        self._require_rank(rank)
        out = torch.empty(self.rotated.n_levels, dtype=torch.int8, device=values.device)
        first = 0
        for levels in self.rotated.levels(values, rank):
            out[first : first + levels.numel()] = lift(levels, _BYTE)
            first += levels.numel()
        return out

    def sums(self, summed: Tensor) -> Iterator[Tensor]:
        _require(summed, self.rotated.n_levels, torch.int8)
        return (summed[first : first + n].to(torch.int32) for first, n in self.rotated.parts(summed))

    @property
    def _steps_for_sigma(self) -> float:
        return SIGMAS / (1 << (_BYTE - 1))


class Lanes(AllReduced):
    """Levels in lanes of `bits` in words of `word_bits`: int64 or int32, `n_words`.

    Position p stands in word p mod n_words, in lane p div n_words, counted from the lowest bit.
    """

    def __init__(self, rotated: Rotated, n_ranks: int, *, bits: int, word_bits: int = 64) -> None:
        """Raises `ValueError` for lanes that do not fit into a word, or are too narrow for so many ranks."""
        if word_bits not in (32, 64):
            raise ValueError(f"word_bits must be 32 or 64, not {word_bits}")
        if not 1 <= bits < 32:
            raise ValueError(f"bits must lie between 1 and 31, not {bits}")
        if not 1 <= n_ranks <= COHORT_MAX:
            raise ValueError(f"n_ranks must lie between 1 and {COHORT_MAX}, not {n_ranks}; sum more ranks in groups")
        self.level_max = min(((1 << bits) - 1) // (2 * n_ranks), LEVEL_MAX)
        if self.level_max < _LEAST_LEVEL:
            least = (2 * n_ranks * _LEAST_LEVEL).bit_length()
            raise ValueError(f"lanes of {bits} bits are too narrow for {n_ranks} ranks; take {least} bits or more")
        super().__init__(rotated, n_ranks)
        self.bits = bits
        self._dtype = torch.int64 if word_bits == 64 else torch.int32
        self.n_words = -(-rotated.n_levels // (word_bits // bits))

    def encode(self, values: Tensor, rank: int) -> Tensor:
        self._require_rank(rank)
        words = torch.zeros(self.n_words, dtype=self._dtype, device=values.device)
        first = 0
        for levels in self.rotated.levels(values, rank, Levels(-self.level_max, self.level_max)):
            lifted = levels.add_(self.level_max).to(self._dtype)
            for lane, places, here in self._runs(first, levels.numel()):
                words[places].add_(lifted[here] << lane * self.bits)
            first += levels.numel()
        return words

    def sums(self, summed: Tensor) -> Iterator[Tensor]:
        _require(summed, self.n_words, self._dtype)
        return (self._part_of(summed, first, n) for first, n in self.rotated.parts(summed))

    def _part_of(self, summed: Tensor, first: int, n_positions: int) -> Tensor:
        lanes = [summed[places] >> lane * self.bits for lane, places, _ in self._runs(first, n_positions)]
        return torch.cat(lanes).bitwise_and_((1 << self.bits) - 1).sub_(self.n_ranks * self.level_max)

    def _runs(self, first: int, n_positions: int) -> Iterator[tuple[int, slice, slice]]:
        """By lane: the words, and which of these positions stand in them."""
        at, stop = first, first + n_positions
        while at < stop:
            lane, word = divmod(at, self.n_words)
            n = min(self.n_words - word, stop - at)
            yield lane, slice(word, word + n), slice(at - first, at - first + n)
            at += n

    @property
    def _steps_for_sigma(self) -> float:
        """For ranks that have nothing in common. Where ranks agree, their dithers make up for the coarser step."""
        return LANE_SIGMAS / (self.level_max * math.sqrt(self.n_ranks))


def _require(summed: Tensor, length: int, dtype: torch.dtype) -> None:
    if summed.shape != (length,) or summed.dtype != dtype:
        raise ValueError(
            f"the sum must have shape [{length}] and type {dtype}, but has shape {list(summed.shape)} and type "
            f"{summed.dtype}"
        )
