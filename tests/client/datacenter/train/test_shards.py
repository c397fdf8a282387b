"""Ranks that train on the same samples are found, also among many in another order; others are not suspected."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, SubsetRandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.client.datacenter.ranks.said_by_ranks import SaidByRanks
from umbel.client import TorchClient
from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.datacenter.train.shards import SAMPLES_MAX, Shard, changed_data, compared_shards

ALL = TensorDataset(torch.randn(60_000, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60_000) % 3)


def compared(*data: Any, may_share: bool = False) -> list[Shard]:
    """As the last of these ranks sees them."""
    ranks, counts, found = SaidByRanks(), list[int](), list[Shard]()
    for one in data:
        count = 7 if isinstance(one, IterableDataset) else len(one) if isinstance(one, list) else None
        client = TorchClient(nn.Linear(4, 3), "classes", one, device="cpu", sample_count=count)
        counts.append(client.sample_count)
        found = compared_shards(ranks.begin(), client, counts, may_share=may_share)
    return found


def part(first: int, last: int) -> Subset[Any]:
    return Subset(ALL, range(first, last))


def loader(rank: int) -> DataLoader[Any]:
    """As loops for DDP have it."""
    return DataLoader(part(0, 900), batch_size=8, sampler=DistributedSampler(part(0, 900), 2, rank))


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ALL)


def test_ranks_with_shares_of_their_own_are_told_apart() -> None:
    shards = compared(part(0, 300), part(300, 700), part(700, 900))
    assert [(one.samples, one.hashed) for one in shards] == [(300, 300), (400, 400), (200, 200)]
    assert len({one.sha256 for one in shards}) == 3
    assert compared(part(0, 300), part(300, 700), part(700, 900)) == shards
    assert compared(part(0, 30_000), part(30_000, 60_000))[0].hashed == SAMPLES_MAX
    assert [one.hashed for one in compared(loader(0), loader(1))] == [450, 450]
    assert compared(_Stream(), _Stream()) == [Shard(7, 0, ""), Shard(7, 0, "")]


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        (part(0, 300), part(0, 300), "100%"),
        (part(0, 300), part(250, 350), "50%"),
        (ALL, ALL, "100%"),
        (ALL, Subset(ALL, torch.randperm(60_000, generator=torch.Generator().manual_seed(1)).tolist()), r"\d+%"),
    ],
    ids=["all", "a half", "many", "many in another order"],
)
def test_ranks_that_share_samples_are_found(first: Any, second: Any, share: str) -> None:
    with pytest.raises(GroupError, match=f"about {share} of the training samples of rank 1 are on rank 0 too"):
        compared(first, second)
    assert len(compared(first, second, may_share=True)) == 2


def test_a_loaders_own_places_count_and_tables_of_few_categories_say_nothing() -> None:
    first, second = (DataLoader(ALL, sampler=SubsetRandomSampler(range(*ends))) for ends in ((0, 300), (300, 600)))
    assert [one.hashed for one in compared(first, second)] == [300, 300]
    with pytest.raises(GroupError, match="about 100%"):
        compared(first, first)
    table = TensorDataset(torch.arange(600) % 64, torch.arange(600) % 2)
    assert [one.hashed for one in compared(table, table)] == [0, 0]
    pictures = [(image, 0) for image in np.random.default_rng(0).integers(0, 9, (30, 40, 40))]
    assert [one.hashed for one in compared(pictures[:15], pictures[15:])] == [15, 15]


def test_a_few_natural_duplicates_are_no_shared_data() -> None:
    twins = TensorDataset(
        torch.cat([ALL.tensors[0][:10], ALL.tensors[0][500:790]]), torch.zeros(300, dtype=torch.int64)
    )
    compared(part(0, 300), twins)


class _Changing(Dataset[Any]):
    """Samples that a transform turns around at random, of which one cannot be read."""

    def __init__(self, broken: int | None = None) -> None:
        self._draw, self._broken = np.random.default_rng(), broken

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> Any:
        if place == self._broken:
            raise OSError("truncated file")
        inputs, target = ALL[place]
        return inputs.flip(0) if self._draw.random() < 0.5 else inputs, target


def test_a_sample_that_cannot_be_read_is_named_with_its_rank() -> None:
    with pytest.raises(
        GroupError, match=r"sample 27 of the training data of rank 1 cannot be read: OSError: truncated file \(test_sha"
    ):
        compared(part(0, 300), _Changing(broken=27))


def test_samples_that_are_drawn_anew_each_time_are_not_compared() -> None:
    assert compared(_Changing()) == [Shard(40, 0, "")]


def test_data_that_have_changed_since_a_checkpoint_are_found_by_rank() -> None:
    before = compared(part(0, 300), part(300, 700), part(700, 900))
    now = compared(part(0, 300), part(300, 699), Subset(ALL, [*range(700, 899), 50_000]))
    assert changed_data(before, before) == []
    assert changed_data(before, now) == [1, 2]
    assert changed_data((), now) == []
    assert changed_data(before[:2], now) == []
