"""The norms of the ranks' updates and their cosines with the mean, against torch's own."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from umbel.client.datacenter.ranks.group import Group
from umbel.client.datacenter.train.differences import RankUpdates, compared

pytestmark = pytest.mark.slow
HERE = "tests.client.datacenter.train.test_differences"
UPDATES = torch.randn(3, 1000, generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True, slots=True)
class Mean:
    values: Tensor

    def mean_slice(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop].clone()


def measured(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Rank 2 has no update in this round."""
    rank = dist.get_rank(group)
    here = Group(rank, dist.get_world_size(group), torch.device("cpu"), group)
    update = None if rank == 2 else iter(torch.split(UPDATES[rank], 300))
    found = compared(here, update, Mean(UPDATES[:2].double().mean(0)))
    assert found.update_norms[2] is None
    assert found.update_cosines[2] is None
    means = torch.tensor([found.update_norm, found.update_cosine])
    norms, cosines = torch.tensor(found.update_norms[:2]), torch.tensor(found.update_cosines[:2])
    return {"norms": norms, "cosines": cosines, "means": means}


def test_all_ranks_know_the_norms_and_cosines_of_all(tmp_path: Path) -> None:
    norms = UPDATES[:2].norm(dim=1)
    cosines = torch.cosine_similarity(UPDATES[:2], UPDATES[:2].mean(0, keepdim=True))
    for one in in_ranks(f"{HERE}:measured", 3, tmp_path):
        torch.testing.assert_close(one["norms"], norms)
        torch.testing.assert_close(one["cosines"], cosines)
        torch.testing.assert_close(one["means"], torch.stack([norms.mean(), cosines.mean()]))


def test_a_round_without_updates_has_no_mean_of_them() -> None:
    assert RankUpdates((None,), (None,)).update_cosine is None
