"""What the tests of a secure round's numbers share: rounds in small, their clients' work, and the sums of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.federations.own_dithers import secret_of
from umbel.aggregation.codec.modular import lift
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, as_float32
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution, LocalWork, contribution
from umbel.aggregation.secagg.numbers.totals import Totals, totals

N_VALUES = 3000


def vector_layout(n_values: int = N_VALUES) -> Layout:
    return Layout((TensorSpec("weight", (n_values,), "float32", 0),))


def gaussian(n_values: int, seed: int) -> Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(seed))


def composed(
    secure: SecurePlan,
    layout: Layout | None = None,
    *,
    step: float = 0.25,
    key: int = 29,
    clip_norm: float | None = None,
    sample_count_max: int = 1 << 20,
    max_abs: float = 2.0**40,
) -> Composition:
    return Composition(
        CodecPlan(Codec.INTEGER, as_float32(1 / step), key, clip_norm),
        secure,
        Grid.finest(max_abs=max_abs, total_weight_max=secure.clients_max * sample_count_max),
        sample_count_max,
        layout or vector_layout(),
    )


def secure_plan(n_clients: int, weight_unit: int = 1, **others: object) -> SecurePlan:
    """For so many clients, with bits that nothing can exceed. Partial work is taken, if it is a step at least."""
    return replace(SecurePlan(1, weight_unit, max(n_clients, 3), minimum_work=0.0), **others).unwrapping()  # type: ignore[arg-type]


def pieces_of(values: Tensor, size: int = 1000) -> Iterator[Tensor]:
    return (part.clone() for part in torch.split(values, size))


def sent(composition: Composition, values: Tensor, work: LocalWork, rank: int) -> Contribution:
    return contribution(composition, lambda: pieces_of(values), work, secret_of(rank))


def work_of(sample_count: int) -> LocalWork:
    return LocalWork(sample_count, 3, 3)


@dataclass
class Cohort:
    """Clients, and what they send."""

    composition: Composition
    contributions: Sequence[Contribution]

    @property
    def ranks(self) -> list[int]:
        return list(range(len(self.contributions)))

    def levels(self) -> Tensor:
        """Their sum, modulo 2^32: the lowest bits are right."""
        total = torch.zeros(self.composition.n_levels, dtype=torch.int32)
        for one in self.contributions:
            total += torch.cat(list(one.levels()))
        return total

    def plain_levels(self) -> Tensor:
        """The same in 64 bits."""
        return torch.stack([torch.cat(list(one.levels())) for one in self.contributions]).to(torch.int64).sum(0)

    def words(self) -> Tensor:
        return torch.stack([one.words for one in self.contributions]).sum(0)

    def totals(self) -> Totals:
        return totals(self.composition, self.levels(), self.words(), self.ranks)

    @property
    def has_wrapped(self) -> bool:
        lifted = lift(self.levels(), self.composition.secure.bits)
        return not torch.equal(lifted.to(torch.int64), self.plain_levels())


def cohort(
    composition: Composition, changes: Sequence[Tensor], works: Sequence[LocalWork], first_rank: int = 0
) -> Cohort:
    """`first_rank`: of the clients, whose dithers go by their ranks."""
    pairs = enumerate(zip(changes, works, strict=True), first_rank)
    return Cohort(composition, [sent(composition, change, work, rank) for rank, (change, work) in pairs])


def mean_of(made: Totals, n_values: int) -> Tensor:
    return made.mean.mean_slice(0, n_values)


def weighted_mean(changes: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    weighed = sum((change.double() * weight for change, weight in zip(changes, weights, strict=True)), torch.zeros(1))
    return weighed / sum(weights)


def error(found: Tensor, wanted: Tensor) -> float:
    """Of the energy."""
    return float((found.double() - wanted.double()).square().sum() / wanted.double().square().sum())
