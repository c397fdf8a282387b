"""Cohorts of one to a thousand clients, stacked and one client after another, on the same device."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from umbel.sim.bench.report import BenchRow
from umbel.sim.bench.simulate.timing import training_s
from umbel.sim.bench.simulate.workloads import Workload, workloads
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.choose import named_engine
from umbel.sim.federation.local_work import steps_asked
from umbel.sim.results.plot_style import GRID, INK, OURS, PEER, dress, new_figure, write_figure

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


_ENGINE_LINES = dict(zip(ENGINES, ((OURS, "stacked"), (PEER, "one after another")), strict=True))


def draw_cohorts(workloads: Sequence[Sequence[CohortPoint]], device: str, path: Path) -> None:
    """`workloads`: the points of each."""
    figure = new_figure(4.4 * len(workloads), 4.4, f'Microseconds for each step of a client, on "{device}"')
    for axes, points in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        _cohorts_panel(axes, points)
    write_figure(figure, path)


def _cohorts_panel(axes: Axes, points: Sequence[CohortPoint]) -> None:
    for engine, (color, words) in _ENGINE_LINES.items():
        measured = [point for point in points if engine in point.seconds]
        sizes, costs = [point.n_clients for point in measured], [point.step_us(engine) for point in measured]
        axes.plot(sizes, costs, "o-", color=color, lw=2, ms=4, label=words)
        last = sizes[-1], costs[-1]
        label = _plain(costs[-1])
        axes.annotate(label, last, (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.1, y=0.15)
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    workload = points[0].workload
    dress(axes, f"{workload.name}: {workload.model_words}", "clients at once", grid=False)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
