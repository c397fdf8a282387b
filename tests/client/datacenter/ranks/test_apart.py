"""A model that reaches the ranks of other clients is found when it is made, in a real group."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.aggregation.collective.ranks import in_ranks
from umbel.client.datacenter.ranks.apart import require_apart
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.datacenter.ranks.names import ranks_of_client

HERE = "tests.client.datacenter.ranks.test_apart"


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def ddp(mesh: DeviceMesh | None) -> nn.Module:
    return DistributedDataParallel(network(), process_group=None if mesh is None else mesh.get_group())


def nested(mesh: DeviceMesh | None) -> nn.Module:
    return nn.ModuleDict({"head": network(), "body": ddp(mesh)})


def sharded(mesh: DeviceMesh | None) -> nn.Module:
    model = network()
    fully_shard(model[1], mesh=mesh)
    return model


def with_norm(mesh: DeviceMesh | None) -> nn.Module:
    norm: nn.Module = nn.SyncBatchNorm(4, process_group=None if mesh is None else mesh.get_group())
    return nn.Sequential(nn.Linear(3, 4), norm)


WRONG: dict[str, tuple[Callable[[DeviceMesh | None], nn.Module], str]] = {
    "ddp": (ddp, "the model of client 1 adds up"),
    "nested": (nested, "the part 'body' of the model of client 1 adds up"),
    "sharded": (sharded, "the parameter '1.weight' of the model of client 1 is distributed"),
    "norm": (with_norm, "the part '1' of the model of client 1 adds up"),
}


def checked(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Each rank is a client of its own. Rank 1 looks at its models."""
    rank = dist.get_rank(group)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("clients", "ranks"))["ranks"]
    own = Group(0, 1, torch.device("cpu"), mesh.get_group(), names=ranks_of_client(rank, 2))
    whole = Group(rank, 2, torch.device("cpu"), group)
    for make, said in WRONG.values():
        require_apart(make(mesh), own)
        model = make(None)
        require_apart(model, whole)
        if rank == 1:
            expected = f"{said} over the ranks 0, 1 of the job, but this client has only 1, so its work would be mixed"
            with pytest.raises(GroupError, match=re.escape(expected)):
                require_apart(model, own)
    require_apart(network(), own)
    return {"rank": torch.tensor(rank)}


@pytest.mark.slow
def test_each_way_over_ranks_of_others_is_named_and_the_clients_own_are_taken(tmp_path: Path) -> None:
    assert [int(one["rank"]) for one in in_ranks(f"{HERE}:checked", 2, tmp_path)] == [0, 1]
