"""`groups.png`: how the last models do for each holder of data by nature, on what it holds back."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from umbel.sim.results.plot import COLOURS, SHOWN_MAX, as_drawn
from umbel.sim.results.plot_style import FAINT, INK, as_percent
from umbel.sim.results.results import Results

_APART = 0.8  # of a holder's row, as much is taken by its points


def groups_plot(results: Results) -> Figure | None:
    """A row for each holder, a dot for each point of the sweep, with its confidence interval where there are several
    seeds; None where nobody holds data by nature.
    """
    points = [point for point in results.points if point.groups][:SHOWN_MAX]
    if not points:
        return None
    names = list(points[0].groups)
    figure = Figure(figsize=(9.5, 1.6 + 0.9 * len(names)), dpi=130, layout=ConstrainedLayoutEngine(), facecolor="white")
    axes = figure.add_subplot()
    rows = np.arange(len(names), dtype=np.float64)
    for number, point in enumerate(points):
        place = rows + _APART * ((number + 0.5) / len(points) - 0.5)
        found = [point.groups[name] for name in names]
        means = np.array([one.mean for one in found])
        low = np.array([one.mean if one.low is None else max(0.0, one.low) for one in found])
        high = np.array([one.mean if one.high is None else min(1.0, one.high) for one in found])
        colour, marker = COLOURS[number % len(COLOURS)], "o" if number < len(COLOURS) else "s"
        axes.errorbar(
            means,
            place,
            xerr=[means - low, high - means],
            fmt=marker,
            color=colour,
            ms=5,
            lw=1.2,
            label=as_drawn(point.label),
        )
    axes.set_yticks(rows, names, color=INK, fontsize=10)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for boundary in rows[1:] - 0.5:
        axes.axhline(boundary, color="#e7ebee", lw=0.8, zorder=0)
    axes.grid(axis="x", color="#e7ebee", lw=0.8, zorder=0)
    axes.xaxis.set_major_formatter(FuncFormatter(as_percent))
    axes.tick_params(axis="x", colors=FAINT, labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_title("accuracy of the last model on what each holds back", loc="left", fontsize=10, color=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(points) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
