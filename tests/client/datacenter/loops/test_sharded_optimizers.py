"""Optimizers of a model that is sharded over two ranks (FSDP2) step as those of a whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.aggregation.collective.ranks import in_ranks
from umbel.aggregation.plans.training import OptimizerName
from umbel.client.local.optimizers import optimizer_of
from umbel.client.local.plan import LocalPlan
from umbel.datacenter import Lamb, Lars

pytestmark = pytest.mark.slow
HERE = "tests.client.datacenter.loops.test_sharded_optimizers"
NAMES: tuple[OptimizerName, ...] = ("lars", "lamb", "muon")
N_STEPS = 5


def network() -> nn.Sequential:
    """Of sizes that two ranks cannot halve; one bias is empty on one rank."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 1))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, n_steps: int) -> list[Tensor]:
    """The whole parameters after some steps. All ranks see the same batches, so sharding does not change the mean."""
    for step in range(n_steps):
        inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
    whole: list[Any] = [one.detach() for one in model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in whole]


def of_a_loop(name: OptimizerName, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that a loop of one's own would make, with the settings of `compared`."""
    match name:
        case "lars":
            return Lars(model.parameters(), 0.05, 0.9, 0.01)
        case "lamb":
            return Lamb(model.parameters(), 0.05, weight_decay=0.01)
        case _:
            pass
    return optimizer_of(LocalPlan(learning_rate=0.05, weight_decay=0.01, optimizer=name), model)


def compared(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """By optimizer and parameter: the greatest difference, and those of all values as a share of how far they moved."""
    found = dict[str, Tensor]()
    for name in NAMES:
        momentum = 0.9 if name == "lars" else 0.0
        plan = LocalPlan(learning_rate=0.05, weight_decay=0.01, optimizer=name, momentum=momentum)
        whole, sharded = network(), network()
        for part in sharded:
            if isinstance(part, nn.Linear):
                fully_shard(part)
        fully_shard(sharded)
        n_steps = 1 if name == "muon" else N_STEPS
        one = trained(whole, of_a_loop(name, whole), n_steps)
        other = trained(sharded, optimizer_of(plan, sharded), n_steps)
        for i, (mine, its, first) in enumerate(zip(one, other, network().parameters(), strict=True)):
            found[f"{name} {i}: greatest"] = (mine - its).abs().max()
            found[f"{name} {i}: share"] = (mine - its).norm() / (mine - first.detach()).norm()
    return found


def test_a_sharded_model_steps_as_a_whole_one(tmp_path: Path) -> None:
    for found in in_ranks(f"{HERE}:compared", 2, tmp_path):
        for name, value in found.items():
            if not name.startswith("muon"):
                assert float(value) <= (1e-6 if name.endswith("greatest") else 1e-4), name
            elif name.endswith("share"):  # torch's Muon computes in bfloat16, whose roundings differ between shards
                assert float(value) <= 0.15, name
