"""Words: what a secure round adds up exactly, in 64 bits each: who and how much, metrics, exact values.

What one client says and what the sum of a cohort says have the same form, so each number here is one or the other. In
their order:

- clients (each says 1: the sum must be the number of those in it, or the masks did not come off), weight, sample count,
  how many did partial work, steps done, steps planned, the weighted change's root mean square in steps times 2^24, and
  how many metrics were cut to what a word can carry;
- for each metric of training, then of evaluation: clients that measured it, their samples, and the sum of samples times
  value times 2^f. Values are cut to 65,536 either way, and one that is not a number counts as 65,536: left out, it
  would show in the sums that a value of one client, or of all but one, is not a number;
- the exact values: integers of the round's grid times the client's weight.

f = 62 - 16 - log2 of all samples that the round can have, at most 32: no sum can reach 2^63, and a mean is off by
2^-(f + 1) for each sample at most. A hundred clients of up to 2^20 samples have f = 19.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from umbel.aggregation.plans.grid import TOTAL_WEIGHT_MAX
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

WORD_BYTES = 8
METRIC_LIMIT = float(1 << 16)
STEPS_LIMIT = 1 << 40  # what one client's steps count at most
RMS_UNIT = 1 << 24
_SUM_BITS, _METRIC_BITS, _FRACTION_BITS_MAX = 62, 16, 32


@dataclass(frozen=True, slots=True, repr=False)
class Counts:
    """The first words, of one client or a sum; no repr, for one client's must not be in a log."""

    clients: int
    weight: int
    sample_count: int
    n_partial: int
    steps_done: int
    steps_planned: int
    rms: int
    n_cut: int


@dataclass(frozen=True, slots=True, repr=False)
class MetricSum:
    """A metric of one client or a sum: the clients that measured it, their samples, samples * value * 2^f."""

    clients: int = 0
    samples: int = 0
    value: int = 0


N_COUNTS = len(fields(Counts))
_N_MEASURED = len(fields(MetricSum))


@dataclass(frozen=True, slots=True)
class Words:
    """Which words there are, for cohorts of up to `clients_max` that count up to `sample_count_max` samples each.

    Raises `ValueError` for more samples than 2^38 in all.
    """

    metrics: tuple[str, ...]
    evaluation: tuple[str, ...]
    n_exact: int
    clients_max: int
    sample_count_max: int

    def __post_init__(self) -> None:
        if not 1 <= self.clients_max * self.sample_count_max <= TOTAL_WEIGHT_MAX:
            raise ValueError(
                f"{self.clients_max} clients of up to {self.sample_count_max} samples could count more than 2^38: "
                "lower sample_count_max or the number of clients asked"
            )

    @property
    def n_words(self) -> int:
        return N_COUNTS + _N_MEASURED * (len(self.metrics) + len(self.evaluation)) + self.n_exact

    @property
    def fraction_bits(self) -> int:
        """f, from 8 to 32."""
        samples_bits = (self.clients_max * self.sample_count_max - 1).bit_length()
        return min(_FRACTION_BITS_MAX, _SUM_BITS - _METRIC_BITS - samples_bits)

    def measured(self, value: float | None, samples: int) -> tuple[MetricSum, bool]:
        """A client's word of a metric over so many samples (`sample_count_max` at most), and whether it was cut.

        `value`: None if the client does not measure it.
        """
        if value is None or samples < 1:
            return MetricSum(), False
        cut = METRIC_LIMIT if math.isnan(value) else min(max(value, -METRIC_LIMIT), METRIC_LIMIT)
        samples = min(samples, self.sample_count_max)
        return MetricSum(1, samples, round(cut * samples * (1 << self.fraction_bits))), cut != value

    def mean_of(self, measured: MetricSum) -> float:
        """The mean over all samples; `measured` must have some."""
        return measured.value / (measured.samples << self.fraction_bits)

    def join(self, counts: Counts, measured: Sequence[MetricSum], exact: Tensor) -> Tensor:
        """The words: int64, `n_words`. `measured`: in the order of `metrics`, then `evaluation`; `exact`: int64."""
        head = [*astuple(counts), *(number for one in measured for number in astuple(one))]
        return torch.cat([torch.tensor(head, dtype=torch.int64), exact])

    def split(self, words: Tensor) -> tuple[Counts, list[MetricSum], Tensor]:
        """The inverse of `join`. Raises `ValueError` for words of another number or type."""
        if words.dtype != torch.int64 or words.shape != (self.n_words,):
            raise ValueError(f"{self.n_words} words of int64 are needed, not {list(words.shape)} of {words.dtype}")
        n_head = self.n_words - self.n_exact
        head: list[int] = words[:n_head].tolist()
        starts = range(N_COUNTS, n_head, _N_MEASURED)
        measured = [MetricSum(*head[start : start + _N_MEASURED]) for start in starts]
        return Counts(*head[:N_COUNTS]), measured, words[n_head:]
