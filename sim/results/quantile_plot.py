"""The picture of how models' accuracies differ between clients, or between natural holders of data (`quantiles.png`).

A panel for each point of the sweep, of its first seed: the mean over clients, each with the same weight; behind it a
band from the accuracy that a tenth of the clients do not exceed to the one that nine tenths do not exceed; and a line
for the worst client. The accuracies are those of `[measure] groups`. Without that section, they are those which clients
measure of the model that they receive (`training.evaluate`, `[evaluation]`), so other clients in each round.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from umbel.sim.experiment.trials import TrialResult
from umbel.sim.federation.rows import Row
from umbel.sim.results.findings import Findings
from umbel.sim.results.plot import COLOURS, SHOWN_MAX, as_drawn, dress_part
from umbel.sim.results.plot_style import INK, as_percent, new_figure

_COLUMNS = 3
_CLIENTS_MIN = 2  # one client has no quantiles worth a band


def quantile_plot(results: Findings) -> Figure | None:
    """The picture, with at most 14 points of a sweep; None where no row has the accuracies of several clients."""
    panels = [(label, _course(group[0])) for label, group in results.by_point.items()]
    panels = [(label, course) for label, course in panels if course][:SHOWN_MAX]
    if not panels:
        return None
    n_columns = min(_COLUMNS, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure = new_figure(4.4 * n_columns, 3.4 * n_rows)
    grid = figure.subplots(n_rows, n_columns, sharey=True, squeeze=False)
    for axes, (label, course) in zip(grid.flat, panels, strict=False):
        _draw(axes, label, course)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, labelcolor=INK, loc="outside lower left", ncols=3)
    return figure


def _course(one: TrialResult) -> Sequence[tuple[int, float | None, Mapping[str, Any]]]:
    """Each round with the mean over clients and the quantiles of their accuracies."""
    rows = [(row, found) for row in one.rows if row.committed and (found := _measured(row)) is not None]
    of_groups = [(row.round, row.groups_accuracy, found) for row, found in rows if row.groups_quantiles]
    return of_groups or [(row.round, row.evaluation.get("accuracy"), found) for row, found in rows]


def _measured(row: Row) -> Mapping[str, Any] | None:
    found = row.groups_quantiles.get("accuracy") or row.evaluation_quantiles.get("accuracy")
    return found if found is not None and found["clients"] >= _CLIENTS_MIN else None


def _draw(axes: Axes, label: str, course: Sequence[tuple[int, float | None, Mapping[str, Any]]]) -> None:
    x = np.array([number for number, _, _ in course])
    mean = np.array([np.nan if one is None else one for _, one, _ in course])
    low, high, worst = (np.array([found[name] for _, _, found in course]) for name in ("p10", "p90", "least"))
    colour, marker = COLOURS[0], "o" if len(course) == 1 else None
    axes.fill_between(x, low, high, color=colour, alpha=0.18, lw=0, zorder=2, label="10 % to 90 % of the clients")
    axes.plot(x, worst, color=COLOURS[1], lw=1.2, marker=marker, zorder=3, label="the worst client")
    axes.plot(x, mean, color=colour, lw=2, marker=marker, zorder=4, label="mean over clients")
    dress_part(axes, f"{as_drawn(label)}: accuracy" if label else "accuracy of clients", "round")
    axes.yaxis.set_major_formatter(FuncFormatter(as_percent))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
