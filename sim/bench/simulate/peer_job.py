"""The work of `umbel bench simulate` written down for a peer: data, first weights, who is asked, and every batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from umbel.sim.bench.simulate.peer_work import write_work
from umbel.sim.bench.simulate.tight_loop import steps_of
from umbel.sim.bench.simulate.timing import seeds_of
from umbel.sim.bench.simulate.workloads import Workload
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation

_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "padding"),
    nn.MaxPool2d: ("kernel_size",),
    nn.Flatten: (),
    nn.ReLU: (),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Rounds of a workload. `cohorts`: who is asked, as many in each round; `weights`: what must come of the last."""

    workload: Workload
    population: ShardedPopulation
    cohorts: tuple[Indices, ...]
    weights: Tensor

    @property
    def n_asked(self) -> int:
        return len(self.cohorts[0])

    def write(self, folder: Path, **words: Any) -> None:
        """Into a folder, for `peer_work.py`, which is told `words` besides."""
        model, plan = self.workload.recipe.make(), self.workload.plan
        data = self.population.data_of(np.arange(self.population.n_clients))
        steps = [self._steps(number, cohort) for number, cohort in enumerate(self.cohorts, start=1)]
        turns = [turn for of_round in steps for turn in of_round]
        arrays = {
            "start": _vector(model).numpy(),
            "clients": np.stack(self.cohorts),
            "sizes": np.concatenate([data.sizes_of(cohort) for cohort in self.cohorts]),
            "inputs": data.samples.inputs.numpy(),
            "targets": data.samples.targets.numpy(),
            "rows": np.concatenate([step for turn in turns for step in turn]),
            "step_ends": np.cumsum([len(step) for turn in turns for step in turn]),
            "turn_ends": np.cumsum([len(turn) for turn in turns]),
        }
        known = {
            "layers": layers_of(model),
            "learning_rate": plan.learning_rate,
            "batch_size": plan.batch_size,
            "n_clients": self.population.n_clients,
        }
        write_work(folder, arrays, known | words)

    def apart(self, weights: Tensor) -> float:
        """How far a peer's last weights are from what must come, by the way that it goes; infinite if not that many."""
        if weights.shape != self.weights.shape:
            return float("inf")
        start = _vector(self.workload.recipe.make())
        return float((weights - self.weights).norm() / (self.weights - start).norm())

    def _steps(self, number: int, cohort: Indices) -> Sequence[Sequence[Indices]]:
        """Which of the population's samples each step of each turn of a round sees."""
        data, seeds = self.population.data_of(cohort), seeds_of(self.workload, cohort, number)
        turns = list[list[Indices]]()
        for seed, first, last in zip(seeds, data.starts, islice(data.starts, 1, None), strict=False):
            own = data.rows[first:last]
            turns.append([own[step.numpy()] for step in steps_of(seed, len(own), self.workload.plan)])
        return turns


def layers_of(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """A chain of layers in words: names in `torch.nn`, and how they are made. Raises `KeyError` for another."""
    return [
        (type(layer).__name__, {name: getattr(layer, name) for name in _ARGUMENTS[type(layer)]})
        for layer in model.children()
    ]


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
