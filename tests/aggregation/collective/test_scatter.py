"""A reduce-scatter of few bits over a real group: near the exact mean, and right on average."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from tests.suite.nights import at_night
from umbel.aggregation.collective.scatter import ScatterMean

pytestmark = pytest.mark.slow
HERE = "tests.aggregation.collective.test_scatter"
N, MANY = 3001, 60
ERRORS = {4: 0.01154, 8: 0.9e-4}  # of one value of a normal distribution


def vector(rank: int, n_ranks: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(n_ranks * N, generator=draw) * torch.logspace(-2, 0, n_ranks * N)


def scattered(group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank, n_ranks, found = dist.get_rank(group), dist.get_world_size(group), dict[str, Tensor]()
    for bits in ERRORS:
        means = [ScatterMean(group, bits).mean_of_part(vector(rank, n_ranks), key) for key in range(MANY)]
        found[f"first, {bits}"], found[f"on average, {bits}"] = means[0], torch.stack(means).mean(0)
    return found


@pytest.mark.parametrize("n_ranks", [2, *at_night(1, 3)])
def test_each_rank_gets_its_part_of_the_mean(n_ranks: int, tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:scattered", n_ranks, tmp_path)
    parts = torch.stack([vector(rank, n_ranks) for rank in range(n_ranks)]).mean(0).view(n_ranks, N)
    for part, found in zip(parts, by_rank, strict=True):
        for bits, once in ERRORS.items():
            first = error(found[f"first, {bits}"], part)
            assert first == pytest.approx(once / (1 - once), rel=0.25), bits
            assert error(found[f"on average, {bits}"], part) < 3 * first / MANY, bits


def error(found: Tensor, wanted: Tensor) -> float:
    """The squared error, as a share of the squared norm."""
    return float((found - wanted).square().sum() / wanted.square().sum())


@pytest.mark.parametrize("bits", [2, 7])
def test_too_few_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="bits"):
        ScatterMean(dist.group.WORLD, bits)  # type: ignore[arg-type]  # it is not asked
