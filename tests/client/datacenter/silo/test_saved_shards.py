"""The shards that some ranks have saved give those of any other number of ranks."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from umbel.client.datacenter.silo.saved_shards import with_shards, without_shards

Placed = Callable[[Tensor], DTensor]


@contextmanager
def as_rank(rank: int, mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> Generator[Placed]:
    """As the process in this place of a mesh that sends nothing; yields what places a whole tensor."""
    order = torch.arange(torch.Size(mesh).numel())
    order[0], order[rank] = rank, 0  # this process is rank 0 everywhere: torch keeps things of a mesh by its ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=len(order))
    try:
        device_mesh = DeviceMesh("cpu", order.view(mesh))
        yield lambda whole: distribute_tensor(whole, device_mesh, placements, src_data_rank=None)
    finally:
        dist.destroy_process_group()


def model_of(weight: DTensor) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    return model


def saved(whole: Tensor, mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> list[Any]:
    """What each rank saves: the weight, and a moment in other places of a nested state."""
    found = list[Any]()
    for rank in range(torch.Size(mesh).numel()):
        with as_rank(rank, mesh, placements) as placed:
            state = {"model": {"weight": placed(whole)}, "optimizer": [0.1, {"moments": (placed(2 * whole), rank)}]}
            found.append(without_shards(state, model_of(placed(whole))))
    return found


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_any_number_of_ranks_gets_its_shards(shape: list[int], before: int, now: int, dim: int) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    placements = (Shard(dim % len(shape)),)
    saves = saved(whole, (before,), placements)
    for rank in range(now):
        with as_rank(rank, (now,), placements) as placed:
            found = with_shards(saves[rank % before], saves, model_of(placed(torch.zeros_like(whole))))
            weight, (moment, number) = found["model"]["weight"], found["optimizer"][1]["moments"]
            assert torch.equal(weight.to_local(), placed(whole).to_local())
            assert torch.equal(moment.to_local(), 2 * weight.to_local())
            assert (weight.shape, weight.placements) == (whole.shape, placements)
            assert (found["optimizer"][0], number) == (0.1, rank % before)


@pytest.mark.parametrize("mesh", [(2, 3), (3, 1)])
@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(1))])
def test_two_dimensions_of_ranks(mesh: tuple[int, int], placements: tuple[Placement, Placement]) -> None:
    whole = torch.randn(7, 5)
    saves = saved(whole, (2, 2), placements)
    for rank in range(torch.Size(mesh).numel()):
        with as_rank(rank, mesh, placements) as placed:
            found = with_shards(saves[0], saves, model_of(placed(torch.zeros_like(whole))))
            assert torch.equal(found["model"]["weight"].to_local(), placed(whole).to_local())


def test_a_missing_shard_is_found_out() -> None:
    whole = torch.randn(8, 2)
    saves = saved(whole, (4,), (Shard(0),))
    with as_rank(1, (2,), (Shard(0),)) as placed:
        model = model_of(placed(whole))
        assert with_shards(saves[0], saves[2:], model)  # it needs no other
        with pytest.raises(ValueError, match="do not make up a tensor"):
            with_shards(saves[0], saves[:3], model)


def test_what_is_no_longer_sharded_is_found_out() -> None:
    saves = saved(torch.randn(8, 2), (2,), (Shard(0),))
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(8, 2))
    with pytest.raises(ValueError, match="'weight' was sharded and is not"):
        with_shards(saves[0], saves, model)
