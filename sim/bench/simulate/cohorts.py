"""Cohorts of one to a thousand clients, stacked and one client after another, on the same device."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from umbel.sim.bench.report import BenchRow
from umbel.sim.bench.simulate.timing import training_s
from umbel.sim.bench.simulate.workloads import Workload, workloads
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.choose import named_engine
from umbel.sim.federation.local_work import steps_asked

_NAMES = ("A", "B", "C")
_SIZES, _QUICK = (1, 3, 10, 30, 100, 300, 1000), (1, 10, 100, 1000)
_REPEATED = 10  # times the clients of B, which has only ten
_TURNS = 3
_LONG_S, _QUICK_LONG_S = 30.0, 6.0
ENGINES = "batched", "sequential"


@dataclass(frozen=True, slots=True)
class CohortPoint:
    """A cohort of `n_clients`, which take `n_steps` in all. `seconds`: by engine that was measured."""

    workload: Workload
    n_clients: int
    n_steps: int
    seconds: dict[str, float]

    def step_us(self, engine: str) -> float:
        """Microseconds for each step of a client."""
        return 1e6 * self.seconds[engine] / self.n_steps


def cohort_rows(device: str, *, quick: bool, plot: Path | None) -> list[BenchRow]:
    """A row for each cohort that was trained in both ways. `plot`: for the picture of all."""
    points = [point for name in _NAMES for point in _points(name, device, quick=quick)]
    if plot is not None:
        from umbel.sim.bench.plots import draw_cohorts

        draw_cohorts([list(group) for _, group in groupby(points, lambda one: one.workload.name)], device, plot)
    return [_row(point, device) for point in points if len(point.seconds) == len(ENGINES)]


def _points(name: str, device: str, *, quick: bool) -> Iterator[CohortPoint]:
    """Growing cohorts; an engine that took long for one is left out from then on."""
    workload = next(one for one in workloads() if one.name == name)
    population = workload.population()
    most = population.n_clients * (_REPEATED if name == "B" and device != "cpu" else 1)
    long_s, left = _QUICK_LONG_S if quick else _LONG_S, list(ENGINES)
    for n_clients in _QUICK if quick else _SIZES:
        if n_clients > most or not left:
            return
        cohort = _of_all_sizes(population, n_clients)
        seconds = {engine: _seconds(workload, population, engine, device, cohort) for engine in left}
        steps = steps_asked(workload.plan, population.sizes(cohort), 1.0)
        yield CohortPoint(workload, n_clients, int(steps.sum()), seconds)
        left = [engine for engine in left if seconds[engine] < long_s]


def _of_all_sizes(population: ShardedPopulation, n_clients: int) -> Indices:
    """Clients evenly from the smallest to the largest, repeated if there are too few."""
    by_size = np.argsort(population.sizes(np.arange(population.n_clients)), kind="stable")
    places = (np.arange(n_clients) + 0.5) * len(by_size) / n_clients
    return by_size[places.astype(np.int64)]


def _seconds(workload: Workload, population: ShardedPopulation, engine: str, device: str, cohort: Indices) -> float:
    """Without the first turn, which prepares kernels and records the model."""
    with closing(named_engine(engine, workload.recipe, device=device)) as made:
        return training_s(workload, population, made, (cohort,) * _TURNS)


def _row(point: CohortPoint, device: str) -> BenchRow:
    what = f"{point.workload.name}: {point.n_clients} at once on {device}, stacked"
    stacked, apart = (1e3 * point.seconds[engine] for engine in ENGINES)
    return BenchRow(what, stacked, "one after another on it", apart, "ms", None)
