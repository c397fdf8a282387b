"""The coordinator's side: from the unmasked sums to the round's totals, and to the mean for the next model.

    mean = unrotate((sum of levels) D / n) n weight_unit / (sum of w)

The levels' sum is lifted from modulo 2^bits to the integers around zero. The words show whether it was right modulo
2^bits: each client has added a one, and the ones must be as many as the clients. The coordinates near the edge show
whether it *fits* the bits: a rotated sum is Gaussian, so if more than a hundredth of them lie beyond three quarters of
the range, one in two thousand has wrapped, and the sum is refused.

A metric that fewer than the round's `minimum` clients have measured is left out, because it would be about few clients.
(That keeps it out of records. The coordinator has seen the sum.) The same holds for counts of one name, and for a
metric of a table (`metric_sums.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from umbel.aggregation.algorithms.fednova import COUNTED_STEPS_MAX, effective_steps
from umbel.aggregation.codec.modular import lift
from umbel.aggregation.counts import COUNT_MAX, CountsByName
from umbel.aggregation.model.state import CountPlaces, ExactPlaces
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.numbers.composition import (
    METRIC_LIMIT,
    RMS_UNIT,
    STEPS_LIMIT,
    Composition,
    Counts,
    CountSum,
)
from umbel.aggregation.secagg.numbers.metric_sums import MetricSum
from umbel.aggregation.types import LEVEL_MAX
from umbel.aggregation.update.grid import integers_sha256

WRAP_SHARE = 0.01
_SQUARED = 1 << 20  # values at a time


class TotalsRefused(SecAggError):
    """Sums from which no model is made: the attempt has failed, and clients of the next one train again."""


class CanaryWrong(TotalsRefused):
    """The words do not count the clients: a mask is left, or a client did not count itself once."""


class ImplausibleTotals(TotalsRefused):
    """Sums that honest clients cannot have. Nobody can tell which client broke the protocol."""


class SumWrapped(TotalsRefused):
    """The levels' sum was larger than its bits: the next attempt must take more bits (`SecurePlan.unwrapping`)."""


class MeanOfSum:
    """The weighted mean of the changes in a sum."""

    def __init__(
        self,
        values: Tensor,
        exact: Tensor,
        places: tuple[ExactPlaces, CountPlaces],
        grid: Grid,
        weights: tuple[int, int],
    ) -> None:
        """`values`: the plain mean of the weighted changes, float32. `exact`: the sums of the exact values, int64.

        `weights`: the factor of `values`, and the sum of all weights.
        """
        self._values = values
        self._exact = exact
        self._places, self._counted = places
        self._grid = grid
        self._factor, self._total_weight = weights

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """The mean of coordinates `start` to `stop`, float64: the same bits on every machine. Of tensors of the kind
        count, the sum.
        """
        mean = self._values[start:stop].to(torch.float64).mul_(self._factor).div_(self._total_weight)
        for at, here in self._places.within(start, stop - start):
            sums = self._exact[at : at + here.stop - here.start]
            mean[here] = sums.to(torch.float64).mul_(self._grid.step)
            counted = torch.zeros(sums.numel(), dtype=torch.bool)
            for _, place in self._counted.within(start + here.start, sums.numel()):
                counted[place] = True
            mean[here] = torch.where(counted, mean[here], mean[here] / self._total_weight)
        return mean


@dataclass(frozen=True, slots=True)
class Totals:
    n_clients: int
    total_weight: int
    sample_count: int
    n_partial: int
    steps_done: int
    steps_planned: int
    effective_steps: float  # FedNova's tau_eff; 1 in a round that is not normalised
    n_cut: int  # metric values beyond 65,536, which were cut
    metrics: Mapping[str, float]  # means over samples, of metrics that enough clients measured
    evaluation: Mapping[str, float]  # likewise
    counts: CountsByName  # exact sums of training, of names that enough clients have
    evaluation_counts: CountsByName  # likewise, of held-out data
    measured_by: Mapping[str, int]  # clients, by `training.NAME` and `evaluation.NAME` of a metric
    counted_by: Mapping[str, int]  # likewise, of counts
    overfull: frozenset[str]  # "training", "evaluation": which table of metrics has not come apart wholly
    shown: SumShown
    sum_sha256: str  # of the lifted levels and then the words, as int64, little-endian, hex
    mean: MeanOfSum = field(repr=False)


def totals(composition: Composition, levels: Tensor, words: Tensor, ranks: Sequence[int]) -> Totals:
    """The totals of these clients from their unmasked sums.

    `levels`: signed integers, `n_levels`, whose lowest `bits` count. `words`: int64, `n_words`. `ranks`: of the clients
    in the sums, in any order. Raises a `TotalsRefused`, and `ValueError` for vectors of another length.
    """
    _check_ranks(composition, ranks)
    counts, measured, exact, counted = composition.words.split(words)
    _check_counts(composition, counts, len(ranks))
    training, evaluation = measured.training, measured.evaluation
    for one in (*training.by_name.values(), *evaluation.by_name.values()):
        _check_measured(composition, one, counts)
    for found in counted:
        _check_counted(found, counts)
    _check_exact(composition, exact, counts.weight)
    lifted = lift(levels.to(torch.int32), composition.secure.bits)
    shown = _shown(composition, lifted, counts)
    weights = counts.clients * composition.secure.weight_unit, counts.weight
    mean = composition.modular.mean(lifted, counts.clients)
    measured_by = {f"training.{name}": one.clients for name, one in training.by_name.items()}
    measured_by |= {f"evaluation.{name}": one.clients for name, one in evaluation.by_name.items()}
    trained, held_out = composition.words.counts_by_name(counted)
    counted_by = {f"training.{name}": one.clients for name, one in trained.items()}
    counted_by |= {f"evaluation.{name}": one.clients for name, one in held_out.items()}
    return Totals(
        n_clients=counts.clients,
        total_weight=counts.weight,
        sample_count=counts.sample_count,
        n_partial=counts.n_partial,
        steps_done=counts.steps_done,
        steps_planned=counts.steps_planned,
        effective_steps=_effective_steps(counts),
        n_cut=counts.n_cut,
        metrics=_means(composition, training.by_name),
        evaluation=_means(composition, evaluation.by_name),
        counts=_enough(composition, trained),
        evaluation_counts=_enough(composition, held_out),
        measured_by=measured_by,
        counted_by=counted_by,
        overfull=frozenset(
            what for what, one in (("training", training), ("evaluation", evaluation)) if not one.is_whole
        ),
        shown=shown,
        sum_sha256=integers_sha256(lifted, words),
        mean=MeanOfSum(mean, exact, (composition.exact, composition.counted), composition.grid, weights),
    )


def _check_ranks(composition: Composition, ranks: Sequence[int]) -> None:
    """Raise `TotalsRefused` for an impossible set of clients."""
    most, least = composition.secure.clients_max, composition.secure.minimum
    if not least <= len(set(ranks)) == len(ranks) <= most or not all(0 <= rank < most for rank in ranks):
        raise TotalsRefused(
            f"the sum has {len(ranks)} ranks, {len(set(ranks))} of them different, but this round allows {least} "
            f"to {most} different ranks from 0 to {most - 1}; the sum is discarded"
        )


def _check_counts(composition: Composition, counts: Counts, n_clients: int) -> None:
    """Raise `CanaryWrong` unless the ones add up, `ImplausibleTotals` for impossible counts."""
    if counts.clients != n_clients:
        raise CanaryWrong(
            "the count of clients in the unmasked sum is wrong: a mask was not removed, or a client did not count "
            "itself exactly once; the sum is discarded"
        )
    least = 0 if composition.is_measured_only else n_clients  # a client may have no held-out data
    if not (
        counts.weight == counts.sample_count
        and least <= counts.weight <= composition.grid.total_weight_max
        and least <= counts.sample_count <= n_clients * composition.sample_count_max
        and 0 <= counts.n_partial <= n_clients
        and n_clients <= counts.steps_done <= counts.steps_planned <= n_clients * STEPS_LIMIT
        and 0 <= counts.rms <= n_clients * LEVEL_MAX * RMS_UNIT
        and 0 <= counts.n_cut <= n_clients * composition.words.n_cut_most
        and _are_steps_plausible(counts)
    ):
        raise ImplausibleTotals(
            "the counts in the unmasked sum are impossible: a client broke the protocol; the sum is discarded"
        )


def _are_steps_plausible(counts: Counts) -> bool:
    """Whether each unit of weight has from 1 to `COUNTED_STEPS_MAX` steps."""
    weighted = counts.weighted_steps
    return weighted is None or counts.weight <= weighted <= counts.weight * COUNTED_STEPS_MAX


def _effective_steps(counts: Counts) -> float:
    return 1.0 if counts.weighted_steps is None else effective_steps(counts.weighted_steps, counts.weight)


def _check_measured(composition: Composition, one: MetricSum, counts: Counts) -> None:
    most = one.samples * int(METRIC_LIMIT) << composition.words.fraction_bits
    is_plausible = 0 <= one.clients <= counts.clients and (
        0 <= one.samples <= one.clients * composition.sample_count_max  # a weight of its own may be 0
    )
    if not (is_plausible and abs(one.value) <= most):
        raise ImplausibleTotals(
            "a metric in the unmasked sum is impossible: a client broke the protocol; the sum is discarded"
        )


def _check_counted(one: CountSum, counts: Counts) -> None:
    most = one.clients * COUNT_MAX
    if not (0 <= one.clients <= counts.clients and all(0 <= number <= most for number in one.numbers)):
        raise ImplausibleTotals(
            "counts in the unmasked sum are impossible: a client broke the protocol; the sum is discarded"
        )


def _check_exact(composition: Composition, exact: Tensor, total_weight: int) -> None:
    if not exact.numel():
        return
    low, high = (int(bound.item()) for bound in exact.aminmax())
    if max(-low, high) > math.ceil(composition.grid.max_abs / composition.grid.step) * total_weight:
        raise ImplausibleTotals(
            "in the unmasked sum, a value of a tensor that no codec rounds is beyond the run's max_abs: a client broke "
            "the protocol; the sum is discarded"
        )


def _shown(composition: Composition, lifted: Tensor, counts: Counts) -> SumShown:
    """What the sum shows for the next round's numbers. Raises `SumWrapped`."""
    share = composition.modular.share_near_the_edge(lifted)
    if share > WRAP_SHARE:
        raise SumWrapped(
            f"{share:.1%} of the sum's values are near the limit of {composition.secure.bits} bits, so some have "
            "overflowed: the updates grew too fast; the sum is discarded, and the next attempt uses enough bits for "
            "every possible sum"
        )
    noise = counts.clients * composition.secure.noise_variance
    step = 1 / composition.codec.inverse_step
    spread = math.sqrt(max(_mean_square(lifted, composition.modular.rotated.blocks.size) - noise, 0.0)) * step
    return SumShown(counts.clients, counts.rms / (RMS_UNIT * counts.clients) * step, spread, share)


def _mean_square(sums: Tensor, block: int) -> float:
    """The greatest of the blocks' mean squares, from exact integers: `sums` are int32, a block 4,096 at most."""
    greatest = 0.0
    for part in torch.split(sums, max(1, _SQUARED // block) * block):
        squares = part.to(torch.int64).square().view(-1, block)
        high = (squares >> 31).sum(1).to(torch.float64)  # the sum itself might not fit
        low = (squares & ((1 << 31) - 1)).sum(1).to(torch.float64)
        greatest = max(greatest, float((high.mul_(2.0**31).add_(low)).amax()) / block)
    return greatest


def _means(composition: Composition, measured: Mapping[str, MetricSum]) -> dict[str, float]:
    return {
        name: composition.words.mean_of(one)
        for name, one in measured.items()
        if one.clients >= composition.secure.minimum and one.samples
    }


def _enough(composition: Composition, counted: Mapping[str, CountSum]) -> dict[str, tuple[int, ...]]:
    return {name: one.numbers for name, one in counted.items() if one.clients >= composition.secure.minimum}
