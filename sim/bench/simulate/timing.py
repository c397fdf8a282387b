"""How long rounds of a workload take: simulated whole, trained by an engine alone, and by a plain loop.

The plain loop is what a careful person writes without a framework: one model, one client after another, slices of
tensors, `torch.optim`, one thread, no loader and no object for a client. It sees the same samples in the same batches
as the simulator, in the order of `aggregation/sample_order.py`, and takes the mean of the clients' weights by samples.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.sample_order import sample_order
from umbel.aggregation.types import ClientId, client_name, client_number
from umbel.client.local.batches import split_sizes
from umbel.sim.bench.simulate.workloads import Workload, workloads
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData, Population, ShardedPopulation
from umbel.sim.engines.choose import named_engine
from umbel.sim.engines.model import LOSSES, ModelRecipe, start_vector
from umbel.sim.engines.work import CohortWork, Engine
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.local_work import Meter, client_seeds, steps_asked
from umbel.sim.federation.world import World
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.section import FleetSection


class TightLoop:
    """Trains rounds of a model. `state`: its weights now, one vector in the order of `parameters()`."""

    def __init__(self, model: nn.Module, plan: TrainingPlan) -> None:
        self._model, self._plan = model, plan
        self._parameters = list(model.parameters())
        self.state = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._optimizer = torch.optim.SGD(self._parameters, lr=plan.learning_rate)

    def round(self, data: CohortData, seeds: Sequence[int]) -> None:
        """Every client of the cohort, and the mean."""
        self.move(self.sum_of(data, seeds, np.arange(len(data))), int(data.sizes.sum()))

    def sum_of(self, data: CohortData, seeds: Sequence[int], positions: Indices) -> Tensor:
        """The sum of the weights of some clients, times their samples."""
        total = torch.zeros_like(self.state)
        for position in positions.tolist():
            total.add_(self.trained(data, position, seeds[position]), alpha=int(data.sizes[position]))
        return total

    def move(self, total: Tensor, n_samples: int) -> None:
        """To the mean."""
        self.state = total / n_samples

    def trained(self, data: CohortData, position: int, seed: int) -> Tensor:
        """The weights of one client after its work."""
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(self.state.clone(), self._parameters)
        own = data.of(position)
        for rows in steps_of(seed, len(own), self._plan):
            self._optimizer.zero_grad()
            functional.cross_entropy(self._model(own.inputs[rows]), own.targets[rows]).backward()
            self._optimizer.step()
        with torch.no_grad():
            return torch.cat([p.reshape(-1) for p in self._parameters])


def steps_of(seed: int, n_samples: int, plan: TrainingPlan) -> Iterator[Tensor]:
    """A client's samples in each step, of all epochs: int64, numbers of its own samples."""
    sizes = split_sizes(n_samples, plan.batch_size)
    for epoch in range(plan.local_epochs or 1):
        yield from torch.from_numpy(sample_order(seed, epoch, n_samples)).split(sizes)


Vector: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
_AGREE = 1e-3  # of the distance that weights have moved; another order of one batch gives a hundred times that


@dataclass(frozen=True, slots=True)
class SimulatedRounds:
    """`seconds`: of a round. `cohorts`: of all rounds, the untimed first one included; `model`: the last."""

    seconds: float
    cohorts: tuple[Indices, ...]
    model: ModelState


@dataclass(frozen=True, slots=True)
class PlainLoop:
    """`seconds`: of a round. `cohorts`: as in `SimulatedRounds`; `weights`: after each round, as in `TightLoop`."""

    seconds: float
    cohorts: tuple[Indices, ...]
    weights: tuple[Tensor, ...]


def simulated(workload: Workload, population: ShardedPopulation, engine: Engine, n_rounds: int) -> SimulatedRounds:
    """Time simulated rounds, without the first, which makes the workers and records the model."""
    run = federation_of(population, engine, workload.recipe, workload.run_file(n_rounds + 1))
    taken, cohorts, began = list[float](), list[Indices](), time.perf_counter()
    for attempt in run.attempts():
        taken.append(time.perf_counter() - began)
        names = [ClientId(client.client) for client in attempt.record.clients]
        cohorts.append(np.array([client_number(name) for name in names]))
        began = time.perf_counter()
    return SimulatedRounds(statistics.median(taken[1:] or taken), tuple(cohorts), run.model)


def federation_of(population: Population, engine: Engine, recipe: ModelRecipe, file: RunFile) -> Federation:
    """A run at its beginning, on devices that are always present."""
    state = ModelState.first(recipe.make().state_dict())
    meter = Meter(recipe.make(), LOSSES[recipe.loss], accuracy=True)
    world = World(population, build_fleet(FleetSection(), 1, Path()), engine, meter)
    return Federation(world, beginning(file, state), state)


def do_nothing() -> None:
    """Only import this module."""


def rounds_of(name: str) -> None:
    """Simulate the rounds of the workload of this name; for a process of its own."""
    workload = next(one for one in workloads() if one.name == name)
    with closing(named_engine("auto", workload.recipe)) as engine:
        simulated(workload, workload.population(), engine, 1)


def training_s(
    workload: Workload, population: ShardedPopulation, engine: Engine, cohorts: tuple[Indices, ...]
) -> float:
    """The time of the engine alone, and of the sum of its changes, for these cohorts."""
    state = workload.recipe.make().state_dict()
    layout = Layout.of_state(state)
    start, taken = start_vector(layout, state), list[float]()
    for number, cohort in enumerate(cohorts, start=1):
        began = time.perf_counter()
        data, seeds = population.data_of(cohort), np.array(seeds_of(workload, cohort, number), dtype=np.uint64)
        work = CohortWork(data, seeds, steps_asked(workload.plan, data.sizes, 1.0), workload.plan)
        total, weights = torch.zeros(layout.n_values), torch.from_numpy(data.sizes).float()
        for changes in engine.train(start, work):
            total += weights[torch.from_numpy(changes.positions)] @ changes.values
        start = start + total / int(data.sizes.sum())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:] or taken)


def plain_loop(workload: Workload, population: ShardedPopulation, ours: SimulatedRounds) -> PlainLoop:
    loop = TightLoop(workload.recipe.make(), workload.plan)
    taken, weights = list[float](), list[Tensor]()
    for number, cohort in enumerate(ours.cohorts, start=1):
        began = time.perf_counter()
        loop.round(population.data_of(cohort), seeds_of(workload, cohort, number))
        taken.append(time.perf_counter() - began)
        weights.append(loop.state)
    _require_agreement(workload, loop, ours)
    return PlainLoop(statistics.median(taken[1:]), ours.cohorts, tuple(weights))


def seeds_of(workload: Workload, cohort: Indices, number: int) -> list[int]:
    """The seeds that a coordinator gives the clients of round `number`, from 1."""
    plan = workload.run_file(number).round_plan(number, 1)
    return [int(seed) for seed in client_seeds(plan, [client_name(i) for i in cohort.tolist()])]


def _require_agreement(workload: Workload, loop: TightLoop, ours: SimulatedRounds) -> None:
    """Raise `AssertionError` unless both sides have the same weights."""
    model = workload.recipe.make()
    begun = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    mine = torch.cat([ours.model.master[name].reshape(-1) for name, _ in model.named_parameters()])
    _require_close((mine - loop.state).norm() / (loop.state - begun).norm())


def require_same_training(workload: Workload, population: ShardedPopulation, engine: Engine, cohort: Indices) -> None:
    """Raise `AssertionError` unless the engine trains the median client as the plain loop does.

    In a deep network on random images, one bit may switch a unit, and such a client's weights then differ by a tenth of
    their change. So the median client counts.
    """
    model, data, seeds = workload.recipe.make(), population.data_of(cohort), seeds_of(workload, cohort, 1)
    layout = Layout.of_state(model.state_dict())
    start, loop = start_vector(layout, model.state_dict()), TightLoop(model, workload.plan)
    work = CohortWork(data, np.array(seeds, np.uint64), steps_asked(workload.plan, data.sizes, 1.0), workload.plan)
    places = {spec.name: spec.place for spec in layout.owners()}
    apart = list[float]()
    for changes in engine.train(start, work):
        for position, change in zip(changes.positions.tolist(), changes.values, strict=True):
            mine = torch.cat([change[places[name]] for name, _ in model.named_parameters()])
            theirs = loop.trained(data, position, seeds[position]) - loop.state
            apart.append(float((mine - theirs).norm() / theirs.norm()))
    _require_close(statistics.median(apart))


def _require_close(apart: float | Tensor) -> None:
    assert float(apart) < _AGREE, f"both models differ by {float(apart):.1%} of the distance that the weights moved"


def two_processes(workload: Workload, population: ShardedPopulation, ours: SimulatedRounds) -> PlainLoop:
    """The plain loop in two forked processes, half of the clients each; always with the first cohort."""
    global _half
    loop = TightLoop(workload.recipe.make(), workload.plan)
    cohorts = ours.cohorts[:1] * len(ours.cohorts)
    data = population.data_of(cohorts[0])
    halves = np.arange(len(data))[::2], np.arange(len(data))[1::2]

    def half(which: int, number: int, state: Tensor) -> Tensor:
        torch.set_num_threads(1)
        loop.state = state
        return loop.sum_of(data, seeds_of(workload, cohorts[0], number), halves[which])

    _half, taken, weights = half, list[float](), list[Tensor]()
    with get_context("fork").Pool(2) as pool:
        for number in range(1, len(cohorts) + 1):
            began = time.perf_counter()
            sums = pool.starmap(_call_half, [(which, number, loop.state.numpy()) for which in range(2)])
            loop.move(torch.from_numpy(sums[0] + sums[1]), int(data.sizes.sum()))
            taken.append(time.perf_counter() - began)
            weights.append(loop.state)
    return PlainLoop(statistics.median(taken[1:]), cohorts, tuple(weights))


_half: Callable[[int, int, Tensor], Tensor]  # for the forked processes


def _call_half(which: int, number: int, state: Vector) -> Vector:
    summed: Vector = _half(which, number, torch.from_numpy(state)).numpy()
    return summed
