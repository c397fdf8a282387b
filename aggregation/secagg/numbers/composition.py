"""The numbers that are masked in a secure round, for both ends: the plans, and what follows from them for a model.

Two vectors are masked. The *levels*: the weighted change of all coded tensors, rotated and rounded, modulo 2^bits. The
*words*: 64 bits each, for what must be added exactly. A client's words and a sum's have the same form:

- clients (each client adds 1, so the sum must be their number, or a mask is left), weight, sample count, clients with
  partial work, steps done, steps planned, the weighted change's root mean square in steps times 2^24, the number of
  metrics that were cut to what a word can carry, and, in a normalised round, the weight times the steps done
  (`algorithms/fednova.py`);
- for each metric of training, then of evaluation: clients that measured it, their samples, and the sum of samples times
  value times 2^f. If a round adds up all metrics, a table of any names takes the place of the listed ones
  (`metric_sums.py`). The weights of a metric that has its own stand in place of samples. Values are cut to +-65,536,
  and a NaN counts as 65,536: if it were left out, the sums would show that a value of one client, or of all but one, is
  not a number;
- for each name of counts, of training and then of evaluation, in the order of the names: clients that have them, and
  their numbers. A client that has counts of another length, or none, adds zeros. One number of one client is at most
  2^40, so no sum can reach 2^57;
- the values of tensors that no codec may round (`model/state.py`): integers of the round's grid times the weight.

f = 62 - 16 - log2 of all samples that the round can have, at most 32: no sum can reach 2^63, and a mean is off by
2^-(f + 1) for each sample at most. A hundred clients of up to 2^20 samples have f = 19.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor

from umbel.aggregation.codec.modular import Modular
from umbel.aggregation.codec.rotated import Rotated
from umbel.aggregation.counts import COUNT_MAX
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import CountPlaces, ExactPlaces
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.codec import TOTAL_WEIGHT_MAX, Codec, CodecPlan, Grid
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.secagg.context import offer_in
from umbel.aggregation.secagg.numbers.metric_sums import (
    ListedMetrics,
    MetricSum,
    MetricSums,
    MetricTable,
    metric_words,
)
from umbel.aggregation.types import MetricNames

WORD_BYTES = 8
METRIC_LIMIT = float(1 << 16)
STEPS_LIMIT = 1 << 40  # what one client's steps count at most
RMS_UNIT = 1 << 24
_SUM_BITS, _METRIC_BITS, _FRACTION_BITS_MAX = 62, 16, 32


@dataclass(frozen=True, slots=True, repr=False)
class Counts:
    """The first words, of one client or a sum; without a repr, because one client's must not be in a log."""

    clients: int
    weight: int
    sample_count: int
    n_partial: int
    steps_done: int
    steps_planned: int
    rms: int
    n_cut: int
    weighted_steps: int | None = None  # None: this round has no such word


@dataclass(frozen=True, slots=True, repr=False)
class MeasuredSums:
    """The metrics of one client or a sum."""

    training: MetricSums
    evaluation: MetricSums  # of held-out data


@dataclass(frozen=True, slots=True, repr=False)
class CountSum:
    """The counts of one name, of one client or a sum."""

    clients: int  # that have them
    numbers: tuple[int, ...]


N_COUNTS = len(fields(Counts)) - 1  # of a round that is not normalised


@dataclass(frozen=True, slots=True)
class Words:
    """The words of cohorts of up to `clients_max` clients with up to `sample_count_max` samples each.

    Raises `ValueError` for more samples than 2^38 in all.
    """

    metrics: MetricNames
    evaluation: MetricNames
    n_exact: int
    clients_max: int
    sample_count_max: int
    counts: Mapping[str, int] = field(default_factory=dict[str, int])  # of training: each name's length
    evaluation_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    key: int = 0  # of the round, for a table of metrics
    is_normalised: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.clients_max * self.sample_count_max <= TOTAL_WEIGHT_MAX:
            raise ValueError(
                f"{self.clients_max} clients with up to {self.sample_count_max} samples each could have more than 2^38 "
                "samples in all: lower sample_count_max, or ask fewer clients"
            )

    @property
    def n_words(self) -> int:
        return self.n_counts + self._n_measured + sum(1 + length for length in self._lengths()) + self.n_exact

    @property
    def n_counts(self) -> int:
        """The number of the first words, `Counts`."""
        return N_COUNTS + self.is_normalised

    @property
    def of_training(self) -> ListedMetrics | MetricTable:
        """The words of the metrics of training."""
        return metric_words(self.metrics, self.key, self.clients_max)

    @property
    def of_evaluation(self) -> ListedMetrics | MetricTable:
        """The words of the metrics of held-out data."""
        return metric_words(self.evaluation, self.key, self.clients_max)

    @property
    def n_cut_most(self) -> int:
        """The most metrics that one client can cut."""
        return self.of_training.n_most + self.of_evaluation.n_most

    @property
    def fraction_bits(self) -> int:
        """f, from 8 to 32."""
        samples_bits = (self.clients_max * self.sample_count_max - 1).bit_length()
        return min(_FRACTION_BITS_MAX, _SUM_BITS - _METRIC_BITS - samples_bits)

    def measured(self, value: float | None, samples: int) -> tuple[MetricSum, bool]:
        """A client's metric over this many samples (`sample_count_max` at most), and whether it was cut.

        `value`: None if the client does not measure it.
        """
        if value is None or samples < 1:
            return MetricSum(), False
        cut = METRIC_LIMIT if math.isnan(value) else min(max(value, -METRIC_LIMIT), METRIC_LIMIT)
        samples = min(samples, self.sample_count_max)
        return MetricSum(1, samples, round(cut * samples * (1 << self.fraction_bits))), cut != value

    def mean_of(self, measured: MetricSum) -> float:
        """The mean over all samples, of which there must be some."""
        return measured.value / (measured.samples << self.fraction_bits)

    def counted(self, found: Mapping[str, Sequence[int]], evaluation: Mapping[str, Sequence[int]]) -> list[CountSum]:
        """A client's counts of training and of held-out data, as far as the round asks them, in the order of words.

        A number beyond 2^40 counts as 2^40, and one below 0 as 0.
        """
        asked = [(found, *one) for one in _in_order(self.counts)]
        asked += [(evaluation, *one) for one in _in_order(self.evaluation_counts)]
        return [_counted(of.get(name), length) for of, name, length in asked]

    def counts_by_name(self, counted: Sequence[CountSum]) -> tuple[dict[str, CountSum], dict[str, CountSum]]:
        """What `counted` returned, by name: of training, and of held-out data."""
        names, n_trained = [name for name, _ in _in_order(self.counts)], len(self.counts)
        names_held_out = [name for name, _ in _in_order(self.evaluation_counts)]
        return (
            dict(zip(names, counted[:n_trained], strict=True)),
            dict(zip(names_held_out, counted[n_trained:], strict=True)),
        )

    def join(self, counts: Counts, measured: MeasuredSums, exact: Tensor, counted: Sequence[CountSum] = ()) -> Tensor:
        """The words: int64, `n_words`. `exact`: int64."""
        head = [*astuple(counts)[: self.n_counts], *self.of_training.join(measured.training.by_name)]
        head += self.of_evaluation.join(measured.evaluation.by_name)
        head += [number for one in counted for number in (one.clients, *one.numbers)]
        return torch.cat([torch.tensor(head, dtype=torch.int64), exact])

    def split(self, words: Tensor) -> tuple[Counts, MeasuredSums, Tensor, list[CountSum]]:
        """The inverse of `join`. Raises `ValueError` for words of another number or type."""
        if words.dtype != torch.int64 or words.shape != (self.n_words,):
            raise ValueError(
                f"the words must have shape [{self.n_words}] and type {torch.int64}, but have shape "
                f"{list(words.shape)} and type {words.dtype}"
            )
        n_head = self.n_words - self.n_exact
        head: list[int] = words[:n_head].tolist()
        first = self.n_counts
        end, middle = first + self._n_measured, first + self.of_training.n_words
        training = self.of_training.split(head[first:middle])
        measured = MeasuredSums(training, self.of_evaluation.split(head[middle:end]))
        counted = list[CountSum]()
        for length in self._lengths():
            counted.append(CountSum(head[end], tuple(head[end + 1 : end + 1 + length])))
            end += 1 + length
        return Counts(*head[:first]), measured, words[n_head:], counted

    @property
    def _n_measured(self) -> int:
        return self.of_training.n_words + self.of_evaluation.n_words

    def _lengths(self) -> Iterator[int]:
        """The numbers of each name of counts, in the order of words."""
        for asked in (self.counts, self.evaluation_counts):
            yield from (length for _, length in _in_order(asked))


def _in_order(asked: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(asked.items())


def _counted(numbers: Sequence[int] | None, length: int) -> CountSum:
    if numbers is None or len(numbers) != length:
        return CountSum(0, (0,) * length)
    return CountSum(1, tuple(min(max(number, 0), COUNT_MAX) for number in numbers))


@dataclass(frozen=True)
class Composition:
    """The numbers of one round and model. Raises `ValueError` for plans whose words could wrap.

    `layout` may be the model's; it becomes that of the update. A round that only measures has no update, so its
    layout is empty, and its few levels are zeros.
    """

    codec: CodecPlan
    secure: SecurePlan
    grid: Grid  # of the exact values, with room for the sum of all weights
    sample_count_max: int  # for one client
    layout: Layout
    is_measured_only: bool = False  # of an evaluation, in which clients do not train

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(()) if self.is_measured_only else self.layout.update)
        if self.codec.codec is not Codec.INTEGER:
            raise ValueError(f"only the integer codec works with masks, not the codec {self.codec.codec.name.lower()}")
        if self.secure.is_proportional:
            raise ValueError(
                'masked updates need weighting = "samples": with "proportional", clients cannot check how often each '
                "was drawn"
            )
        if self.grid.total_weight_max < self.secure.clients_max * self.sample_count_max:
            raise ValueError(
                f"the weights of this cohort can add up to {self.secure.clients_max * self.sample_count_max}, which is "
                f"more than the grid's total_weight_max of {self.grid.total_weight_max} (docs/glossary.md: grid)"
            )
        _ = self.words  # refuses counts that could wrap

    @cached_property
    def modular(self) -> Modular:
        """The levels. The client clips before it weighs, so the codec plan here has no clip norm."""
        rotated = Rotated(CodecPlan(Codec.INTEGER, self.codec.inverse_step, self.codec.key), self.layout.n_values)
        return Modular(rotated, self.secure.bits)

    @cached_property
    def exact(self) -> ExactPlaces:
        return ExactPlaces(self.layout)

    @cached_property
    def counted(self) -> CountPlaces:
        return CountPlaces(self.layout)

    @cached_property
    def is_counted(self) -> Tensor:
        """By exact value, whether its tensor has the kind count: bool."""
        found = torch.zeros(self.exact.n_values, dtype=torch.bool)
        for at, here in self.exact.within(0, self.layout.n_values):
            for _, place in self.counted.within(here.start, here.stop - here.start):
                found[at + place.start : at + place.stop] = True
        return found

    @cached_property
    def words(self) -> Words:
        secure = self.secure
        names, most = (secure.metrics, secure.evaluation), (secure.clients_max, self.sample_count_max)
        counts = secure.counts, secure.evaluation_counts
        is_normalised = secure.is_normalised and not self.is_measured_only
        return Words(*names, self.exact.n_values, *most, *counts, self.codec.key, is_normalised)

    @property
    def n_levels(self) -> int:
        """The number of levels of a client, in `secure.bits` each."""
        return self.modular.rotated.n_levels

    @property
    def n_words(self) -> int:
        return self.words.n_words


def composition_of(assignment: Assignment, layout: Layout) -> Composition:
    """The numbers that are masked. Raises `ValueError` for plans that could wrap, `Disagreement`."""
    plan, only = offer_in(assignment).plan, not assignment.task.sends_updates
    return Composition(assignment.codec, plan, assignment.grid, assignment.sample_count_max, layout, only)
