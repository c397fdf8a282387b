"""The style of all pictures: sizes, colours, titles, and how they are written."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, FAINT, GRID = "#22313f", "#66737f", "#e6eaee"
OURS, PEER, LIMIT, SLATE = "#0f7b6c", "#c8871e", "#a9b4bd", "#44546a"  # of the benchmarks


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty picture, its size in inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.05, wspace=0.05)
    figure = Figure(figsize=(width, height), dpi=130, layout=layout, facecolor="white")
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write the picture into a folder, which is made if missing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def dress_bench(axes: Axes, title: str, x_label: str, y_label: str = "") -> None:
    """Title, labels, legend and grid of a part of a benchmark's picture."""
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x_label, color=FAINT, fontsize=9)
    axes.set_ylabel(y_label, color=FAINT, fontsize=9)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def dress(axes: Axes, title: str, x_label: str, *, grid: bool = True) -> None:
    """Title, the x axis's words, and what frames it. `grid`: lines across, behind what is drawn."""
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", color=INK, pad=9)
    axes.set_xlabel(x_label, color=FAINT, fontsize=9.5)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    if grid:
        axes.grid(axis="y", color=GRID, lw=0.8)
        axes.set_axisbelow(True)


def as_percent(share: float, _: int | None = None) -> str:
    """A tick's words, of as many places as it takes: `12.5%`."""
    return f"{100 * share:.4g}%"
