"""Ranks of one client that have different samples are found."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.client.datacenter.ranks.said_by_ranks import SaidByRanks
from umbel.client import TorchClient
from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.datacenter.ranks.samples import require_same_samples

ALL = TensorDataset(torch.randn(900, 4, generator=torch.Generator().manual_seed(0)), torch.arange(900) % 3)


def compared(*data: Any) -> None:
    ranks = SaidByRanks()
    for one in data:
        require_same_samples(ranks.begin(), TorchClient(nn.Linear(4, 3), "classes", one, device="cpu"))


def test_ranks_with_the_same_samples_in_the_same_order_are_one_client() -> None:
    compared(ALL, Subset(ALL, range(900)), ALL)
    compared(DataLoader(ALL, 8), DataLoader(ALL, 8))


@pytest.mark.parametrize(
    "other",
    [
        Subset(ALL, range(899, -1, -1)),
        Subset(ALL, range(450)),
        DataLoader(ALL, 8, sampler=DistributedSampler(ALL, 2, 1)),
    ],
    ids=["another order", "a half", "a distributed sampler"],
)
def test_a_rank_with_other_samples_is_named(other: Any) -> None:
    with pytest.raises(GroupError, match="rank 2 has other training samples than rank 0"):
        compared(ALL, ALL, other)


def test_samples_that_cannot_be_compared_are_not() -> None:
    compared(TensorDataset(torch.arange(600) % 64, torch.arange(600) % 2), ALL)
