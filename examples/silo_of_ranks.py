"""Two silos that train on several processors or GPUs each, and are one client each; a third one has one process.

The variable SILO is the silo's number, which chooses its records. examples/silo_of_ranks.toml is the run. From the
repository's root:

SILO=0 torchrun --standalone --nproc-per-node 2 -m -- umbel join --server URL --token TOKEN --run silos --state silo-0 \
    --app examples.silo_of_ranks:sharded
SILO=1 torchrun --standalone --nproc-per-node 2 -m -- umbel join --server URL --token TOKEN --run silos --state silo-1 \
    --app examples.silo_of_ranks:staged
SILO=2 umbel join --server URL --token TOKEN --run silos --state silo-2 --app examples.silo_of_ranks:plain

`sharded` is the ready trainer with a model that FSDP2 shards. `staged` is a loop of its own over the stages of a
pipeline. `plain` is the same silo in one process.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import TensorDataset

from umbel.client import Client, LocalPlan, TorchClient, TrainResult
from umbel.datacenter import rank_part

N_SILOS, N_SAMPLES, N_MICROBATCHES = 3, 128, 2
N_HELD_OUT = 40
SILO = int(os.environ.get("SILO", "0"))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2))


def records(number: int) -> tuple[TensorDataset, TensorDataset]:
    """A silo's own: to train on, and to measure with."""
    values, classes = (torch.tensor(part[number::N_SILOS]) for part in load_breast_cancer(return_X_y=True))
    values = values.float().log1p()
    train, held_out = slice(N_SAMPLES), slice(N_SAMPLES, N_SAMPLES + N_HELD_OUT)
    return TensorDataset(values[train], classes[train]), TensorDataset(values[held_out], classes[held_out])


def plain() -> TorchClient:
    train, held_out = records(SILO)
    return TorchClient(network(), "classes", train, held_out)


def sharded() -> TorchClient:
    """Each rank holds a shard of every tensor, and trains on a part of every batch."""
    model = network()
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    train, held_out = records(SILO)
    return TorchClient(model, "classes", train, held_out, part=rank_part())


def staged() -> "Stage":
    return Stage(network())


class Stage(Client):
    """One stage of a pipeline on each rank. All ranks take the same batches."""

    def __init__(self, whole: nn.Sequential) -> None:
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
        self._is_last = rank == n_ranks - 1
        self.model = _layers(whole, rank, n_ranks)
        stage = PipelineStage(self.model, rank, n_ranks, torch.device("cpu"))
        self._schedule = ScheduleGPipe(stage, N_MICROBATCHES, loss_fn=nn.functional.cross_entropy)
        self._data, _ = records(SILO)
        self.sample_count = len(self._data)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        optimizer = plan.make_optimizer(model)
        steps = plan.drive(self._data, keep={"model": model, "optimizer": optimizer})
        for inputs, classes in steps:
            optimizer.zero_grad()
            losses = list[Tensor]()
            if self._is_last:
                self._schedule.step(target=classes, losses=losses)
                steps.note(loss=torch.stack(losses).mean())
            else:
                self._schedule.step(inputs)
            plan.adjust_gradients(model)
            optimizer.step()
        return steps.result(self.sample_count)


def _layers(whole: nn.Sequential, rank: int, n_ranks: int) -> nn.Sequential:
    """This rank's layers, under the names that they have in the whole model."""
    mine, size = nn.Sequential(), -(-len(whole) // n_ranks)
    for number in range(rank * size, min((rank + 1) * size, len(whole))):
        mine.add_module(str(number), whole[number])
    return mine
