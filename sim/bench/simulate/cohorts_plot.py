"""What stacking gains by the size of the cohort, as a picture: a panel for each workload."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from umbel.sim.bench.simulate.cohorts import ENGINES, CohortPoint
from umbel.sim.results.plot_style import GRID, INK, dress, new_figure, write_figure

_LINES = dict(zip(ENGINES, (("#0f7b6c", "stacked"), ("#c8871e", "one after another")), strict=True))


def draw(workloads: Sequence[Sequence[CohortPoint]], device: str, path: Path) -> None:
    """Write the picture. `workloads`: the points of each. Raises `OSError` if that cannot be done."""
    figure = new_figure(4.4 * len(workloads), 4.4, f'Microseconds for each step of a client, on "{device}"')
    for axes, points in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        _panel(axes, points)
    write_figure(figure, path)


def _panel(axes: Axes, points: Sequence[CohortPoint]) -> None:
    for engine, (colour, words) in _LINES.items():
        measured = [point for point in points if engine in point.seconds]
        sizes, costs = [point.n_clients for point in measured], [point.step_us(engine) for point in measured]
        axes.plot(sizes, costs, "o-", color=colour, lw=2, ms=4, label=words)
        last = sizes[-1], costs[-1]
        axes.annotate(
            _plain(last[1]), last, (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=colour
        )
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
