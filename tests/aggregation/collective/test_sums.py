"""Sums and bytes over a real group: exact, and the same on all ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from umbel.aggregation.collective.lanes import Lanes
from umbel.aggregation.collective.sums import broadcast_bytes, gather_bytes, reduced, sum_of_levels, sum_over_ranks
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.update.grid import GridAccumulator

pytestmark = pytest.mark.slow
HERE = "tests.aggregation.collective.test_sums"
CPU = torch.device("cpu")
N = 5000
GRID = Grid.finest(max_abs=8.0, total_weight_max=1000)


def vector(rank: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank))


def levels(rank: int) -> Tensor:
    return (vector(rank) * 20).to(torch.int32)


def all_of_them(group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank = dist.get_rank(group)
    part, whole = GridAccumulator(N, GRID), GridAccumulator(N, GRID)
    if rank != 1:  # whose report does not count
        part.fold_vector(vector(rank), 10 + rank)
    sum_over_ranks(part, whole, group, CPU)
    mine = None if rank == 1 else iter(levels(rank).split(1700))
    gathered = gather_bytes(bytes([rank]) * (3 * rank), group, CPU)
    return {
        "sums": whole.sums,
        "weights": torch.tensor([whole.total_weight, whole.n_folded]),
        "levels": sum_of_levels(mine, Lanes(N, 9), group, CPU),
        "words": reduced(torch.tensor([1 << 62, -rank]), group, CPU),
        "gathered": torch.tensor([len(one) for one in gathered] + [len(set(b"".join(gathered)))]),
        "from the first": torch.tensor([*broadcast_bytes(b"abc" if rank == 0 else b"other", group, CPU)]),
        "nothing from the first": torch.tensor([len(broadcast_bytes(b"", group, CPU))]),
    }


def test_sums_are_exact_and_bytes_come_whole(tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:all_of_them", 3, tmp_path)
    whole = GridAccumulator(N, GRID)
    for rank in (0, 2):
        whole.fold_vector(vector(rank), 10 + rank)
    wanted = {
        "sums": whole.sums,
        "weights": torch.tensor([22, 2]),
        "levels": levels(0) + levels(2),
        "words": torch.tensor([-(1 << 62), -3]),  # it wraps, as masked words do
        "gathered": torch.tensor([0, 3, 6, 2]),
        "from the first": torch.tensor([*b"abc"]),
        "nothing from the first": torch.tensor([0]),
    }
    for found in by_rank:
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
