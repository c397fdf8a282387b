"""Clients of two ranks each, and the same clients in one process each."""

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from umbel.client import Client, LocalPlan, TorchClient, TrainResult
from umbel.datacenter import rank_part

HERE = "tests.client.datacenter.train.divided_clients"
ROUND = 2  # of the kill


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def samples(number: int) -> TensorDataset:
    inputs = torch.randn(23 + number, 5, generator=torch.Generator().manual_seed(number))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def plain(number: int, of: int) -> TorchClient:
    return TorchClient(network(), "classes", samples(number), samples(number + of))


def sharded(number: int, of: int, mesh: DeviceMesh) -> TorchClient:
    """The even clients shard their model, and the odd ones replicate it."""
    model = network()
    if number % 2 == 0:
        fully_shard(model, mesh=mesh)
        return TorchClient(model, "classes", samples(number), samples(number + of), part=rank_part(mesh))
    copied = DistributedDataParallel(model, process_group=mesh.get_group())
    return TorchClient(copied, "classes", samples(number), samples(number + of), part=rank_part(mesh))


def unnamed(number: int, of: int, mesh: DeviceMesh) -> TorchClient:
    """Each copy of the model has all ranks of the job."""
    copied = DistributedDataParallel(network())
    return TorchClient(copied, "classes", samples(number), part=rank_part(mesh))


class _Mixed(TorchClient):
    """Adds up over all ranks of the job, which its model does not show."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        dist.all_reduce(torch.ones(1))
        return super().training_step(model, batch)


def mixed(number: int, of: int, mesh: DeviceMesh) -> TorchClient:
    copied = DistributedDataParallel(network(), process_group=mesh.get_group())
    return _Mixed(copied, "classes", samples(number), part=rank_part(mesh))


class _Killed(TorchClient):
    """The second rank of the second client is killed once."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        if os.environ["RANK"] == "3" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and plan.round == ROUND:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(model, plan)


def killed(number: int, of: int, mesh: DeviceMesh) -> Client:
    model = network()
    fully_shard(model, mesh=mesh)
    return _Killed(model, "classes", samples(number), samples(number + of), part=rank_part(mesh))


def failing(number: int, of: int, mesh: DeviceMesh) -> Client:
    """The second rank of the first client fails outside sums."""
    client = sharded(number, of, mesh)
    if os.environ["RANK"] == "1":
        client.prepare = _broken  # type: ignore[method-assign]
    return client


def _broken(plan: LocalPlan) -> None:
    raise ValueError("no such scanner")
