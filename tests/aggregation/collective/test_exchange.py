"""Means by an exchange of few bits over a real group: near the exact mean, right on average, and alike on all ranks."""

import math
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from umbel.aggregation.collective.exchange import ExchangeMean
from umbel.aggregation.collective.mean import Float32Mean

pytestmark = pytest.mark.slow
N, MANY = 40_000, 60
ERRORS = {2: 0.1188, 4: 0.01154, 8: 0.9e-4}  # of one value of a normal distribution
WAYS = ((2, True), (4, True), (4, False), (8, False))  # bits, and whether what is left out is fed back
SHORT = (1, 50, 511, 1030, 1100, 5000)  # some fill their last part only in part
HERE = "tests.aggregation.collective.test_exchange"


def vector(rank: int, n_values: int = N) -> Tensor:
    """Layers of different sizes, as gradients have."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(n_values, generator=draw) * torch.logspace(-3, 0, n_values)


def short(rank: int, n_values: int) -> Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(50 + rank))


def exact(n_ranks: int) -> Tensor:
    return torch.stack([vector(rank) for rank in range(n_ranks)]).mean(0)


def many_means(group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank, found = dist.get_rank(group), dict[str, Tensor]()
    for bits, fed in WAYS:
        means = ExchangeMean(group, bits, feedback=fed)
        keys = [7 if fed else key for key in range(MANY)]
        found[f"first, {bits}, {fed}"] = means.mean(vector(rank), keys[0])
        others = [means.mean(vector(rank), key) for key in keys[1:]]
        found[f"on average, {bits}, {fed}"] = (found[f"first, {bits}, {fed}"] + sum(others)) / MANY
    found["float32"] = Float32Mean(group).mean(vector(rank), 0)
    for n_values in SHORT:
        found[f"of {n_values}"] = ExchangeMean(group, 8).mean(short(rank, n_values), 1)
    found["zeros"] = ExchangeMean(group, 4).mean(torch.zeros(3000), 1)
    bad = vector(rank, 3000)
    bad[17] = math.inf if rank == dist.get_world_size(group) - 1 else 1.0
    found["not finite"] = ExchangeMean(group, 4).mean(bad, 1)
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    """The squared error, as a share of the squared norm."""
    return float((found - wanted).square().sum() / wanted.square().sum())


@pytest.mark.parametrize(
    "n_ranks", [2, pytest.param(1, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_the_mean_is_as_good_as_the_grid_and_better_on_average(n_ranks: int, tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:many_means", n_ranks, tmp_path)
    for name, tensor in by_rank[0].items():
        for other in by_rank[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=0, equal_nan=True)
    found, mean = by_rank[0], exact(n_ranks)
    torch.testing.assert_close(found["float32"], mean)
    for bits, fed in WAYS:
        # Rounded by each rank, whose vectors have nothing in common, and then once more: each time the same share. The
        # mean of one rank is on the grid already.
        n_times, once, first = min(n_ranks, 2), ERRORS[bits], error(found[f"first, {bits}, {fed}"], mean)
        assert first == pytest.approx(n_times * once / (1 if fed else 1 - once), rel=0.25), bits
        assert error(found[f"on average, {bits}, {fed}"], mean) < 3 * first / MANY, bits
    for n_values in SHORT:
        wanted = torch.stack([short(rank, n_values) for rank in range(n_ranks)]).mean(0)
        assert error(found[f"of {n_values}"], wanted) < 2e-3, n_values
    assert not found["zeros"].any()
    assert found["not finite"].isnan().any()


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits must be one of 2, 4, 8, not 7"):
        ExchangeMean(cast(dist.ProcessGroup, None), 7)
    with pytest.raises(ValueError, match="2 bits need error feedback; without it take 4 bits or more"):
        ExchangeMean(cast(dist.ProcessGroup, None), 2)
