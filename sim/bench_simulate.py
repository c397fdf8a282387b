"""`umbel bench simulate`: local training, and whole simulated rounds, against a plain loop.

*Training* is an engine's work and a weighted sum of what comes of it, and theirs (`tight_loop.py`) likewise: what is
promised is of that. A *whole round* is everything beside: who waits, who is drawn, virtual time, updates on the grid,
the exact sum, the next model and its hash, the record of each client. Both sides train the same batches of the same
clients, and that they come to the same weights is asserted.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.types import ClientId
from umbel.sim.bench import Hold, Report, Row
from umbel.sim.data.partition import Indices
from umbel.sim.data.population import ShardedPopulation, client_name, client_number
from umbel.sim.engines.choose import named_engine
from umbel.sim.engines.losses import LOSSES
from umbel.sim.engines.resident import start_vector
from umbel.sim.engines.stacked import StackedEngine
from umbel.sim.engines.threads import one_thread
from umbel.sim.engines.work import CohortWork, Engine
from umbel.sim.experiments.federation import Federation, World, beginning
from umbel.sim.experiments.local_work import Meter, client_seeds, steps_asked
from umbel.sim.experiments.versions import ModelState
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.section import FleetSection
from umbel.sim.simulate_workloads import Workload, workloads
from umbel.sim.tight_loop import TightLoop

Vector: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
_AGREE = 1e-4  # of weights after the rounds that are compared; rounding is a hundred times less
_BY_HAND, _ANY = "linear chains", "any module"
_TWO_PROCESSES_MAX = 1.05
_PROMISES = {("A", _BY_HAND): 5.0, ("A", _ANY): 3.0, ("C", _BY_HAND): 8.0, ("Cs", _BY_HAND): 30.0}


def measure(*, quick: bool, only: str | None = None) -> Report:
    """Run them all, or the one of that name. Raises `ValueError` for a name that none has."""
    chosen = [one for one in workloads() if only is None or one.name == only]
    if not chosen:
        raise ValueError(f"there is no workload {only}; there are {', '.join(one.name for one in workloads())}")
    rows = list[Row]()
    for workload in chosen:
        rows += _compare(workload, workload.rounds_quick if quick else workload.rounds)
    notes = (
        "Milliseconds of a round, the median. Theirs: one model, slices, torch.optim, one thread; of B two processes.",
        "Training: an engine's work and the sum of it. A whole round has all else that a coordinator does, too.",
    )
    return Report("simulate", tuple(rows), notes)


def _compare(workload: Workload, n_rounds: int) -> list[Row]:
    population = workload.population()
    with one_thread():
        if workload.name == "B":
            with closing(named_engine("auto", workload.recipe)) as engine:
                ours = _ours(workload, population, engine, n_rounds)
            return [_row(workload, "auto", ours.seconds, _two(workload, population, ours), _TWO_PROCESSES_MAX)]
        rows, theirs = list[Row](), 0.0
        for how, by_hand in ((_BY_HAND, True), (_ANY, False)):
            engine = StackedEngine(workload.recipe.make(), LOSSES[workload.recipe.loss], by_hand=by_hand)
            ours = _ours(workload, population, engine, n_rounds)
            theirs = theirs or _theirs(workload, population, ours)
            promise = _PROMISES.get((workload.name, how))
            training = _training(workload, population, engine, ours)
            rows.append(_row(workload, f"{how}, training", training, theirs, promise and 1 / promise))
            rows.append(_row(workload, f"{how}, whole round", ours.seconds, theirs, None))
        return rows


def _row(workload: Workload, how: str, ours: float, theirs: float, bound: float | None) -> Row:
    against = "the plain loop, two processes" if workload.name == "B" else "the plain loop"
    promise = None if bound is None else Hold(round(bound, 4))
    return Row(f"{workload.name}: {workload.words}; {how}", 1e3 * ours, against, 1e3 * theirs, "ms", promise)


@dataclass(frozen=True, slots=True)
class Timed:
    """`seconds`: of a round. `cohorts`: who was in each, the first included, which is not timed; `model`: the last."""

    seconds: float
    cohorts: tuple[Indices, ...]
    model: ModelState


def _ours(workload: Workload, population: ShardedPopulation, engine: Engine, n_rounds: int) -> Timed:
    """The first round is left out: it makes the workers, and records the model."""
    state = ModelState.first(workload.recipe.make().state_dict())
    meter = Meter(workload.recipe.make(), LOSSES[workload.recipe.loss], accuracy=True)
    world = World(population, build_fleet(FleetSection(), 1, Path()), engine, meter)
    run = Federation(world, beginning(workload.run_file(n_rounds + 1), state), state)
    taken, cohorts, began = list[float](), list[Indices](), time.perf_counter()
    for attempt in run.attempts():
        taken.append(time.perf_counter() - began)
        names = [ClientId(client.client) for client in attempt.record.clients]
        cohorts.append(np.array([client_number(name) for name in names]))
        began = time.perf_counter()
    return Timed(statistics.median(taken[1:]), tuple(cohorts), run.model)


def _training(workload: Workload, population: ShardedPopulation, engine: Engine, ours: Timed) -> float:
    """The engine alone, and the sum of what comes of it, for the cohorts of the rounds that were timed."""
    layout = ours.model.layout
    start, taken = start_vector(layout, workload.recipe.make().state_dict()), list[float]()
    for number, cohort in enumerate(ours.cohorts, start=1):
        began = time.perf_counter()
        data, seeds = population.data_of(cohort), np.array(_seeds(workload, cohort, number), dtype=np.uint64)
        work = CohortWork(data, seeds, steps_asked(workload.plan, data.sizes, 1.0), workload.plan)
        total, weights = torch.zeros(layout.n_values), torch.from_numpy(data.sizes).float()
        for changes in engine.train(start, work):
            total += weights[torch.from_numpy(changes.positions)] @ changes.values
        start = start + total / int(data.sizes.sum())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _theirs(workload: Workload, population: ShardedPopulation, ours: Timed) -> float:
    loop = TightLoop(workload.recipe.make(), workload.plan)
    taken = list[float]()
    for number, cohort in enumerate(ours.cohorts, start=1):
        began = time.perf_counter()
        loop.round(population.data_of(cohort), _seeds(workload, cohort, number))
        taken.append(time.perf_counter() - began)
    _require_agreement(workload, loop, ours)
    return statistics.median(taken[1:])


def _seeds(workload: Workload, cohort: Indices, number: int) -> list[int]:
    """As a coordinator gives them."""
    plan = workload.run_file(number).round_plan(number, 1)
    return [int(seed) for seed in client_seeds(plan, [client_name(i) for i in cohort.tolist()])]


def _require_agreement(workload: Workload, loop: TightLoop, ours: Timed) -> None:
    """Both have made the same model. Raises `AssertionError`."""
    names = [name for name, _ in workload.recipe.make().named_parameters()]
    mine = torch.cat([ours.model.master[name].reshape(-1) for name in names])
    assert float((mine - loop.state).abs().max()) < _AGREE, "the plain loop makes another model"


def _two(workload: Workload, population: ShardedPopulation, ours: Timed) -> float:
    """The plain loop over two processes, forked once, half of the clients each."""
    global _half
    loop = TightLoop(workload.recipe.make(), workload.plan)
    data = population.data_of(ours.cohorts[0])
    halves = np.arange(len(data))[::2], np.arange(len(data))[1::2]

    def half(which: int, number: int, state: Tensor) -> Tensor:
        torch.set_num_threads(1)
        loop.state = state
        return loop.sum_of(data, _seeds(workload, ours.cohorts[0], number), halves[which])

    _half, taken = half, list[float]()
    with get_context("fork").Pool(2) as pool:
        for number in range(1, len(ours.cohorts) + 1):
            began = time.perf_counter()
            sums = pool.starmap(_call_half, [(which, number, loop.state.numpy()) for which in range(2)])
            loop.move(torch.from_numpy(sums[0] + sums[1]), int(data.sizes.sum()))
            taken.append(time.perf_counter() - began)
    _require_agreement(workload, loop, ours)
    return statistics.median(taken[1:])


_half: Callable[[int, int, Tensor], Tensor]  # what the forked processes find


def _call_half(which: int, number: int, state: Vector) -> Vector:
    summed: Vector = _half(which, number, torch.from_numpy(state)).numpy()
    return summed
