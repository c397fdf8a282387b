"""A picture of a partition: the classes and sizes of clients, and how different clients are.

Colours are Paul Tol's "muted" set, which people with any colour vision can distinguish; for too many classes or clients
for bars, a map from light to dark.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from umbel.sim.data.partition.heterogeneity import are_classes, heterogeneity
from umbel.sim.data.partition.partition import Indices, Partition, class_counts
from umbel.sim.results.plot_style import FAINT, INK, dress

Floats: TypeAlias = npt.NDArray[np.float64]

BARS_MAX, COLUMNS_MAX = 40, 500
_ONE_COLOR = "#44AA99"
_MUTED = (
    "#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB",
)  # fmt: skip
_MAP = LinearSegmentedColormap.from_list("light to dark", ["#ffffff", "#9ed5c7", "#2b8a86", "#0a4f63", "#14213d"])
_SPREAD = 20  # from the smallest to the largest client; beyond, sizes are drawn by their logarithm
_BINS_MAX, _NAMES_MAX, _LETTERS_MAX = 40, 32, 20
_SHARES = "Share of each class in a client's samples"


def draw_split(
    path: Path,
    partition: Partition,
    labels: npt.NDArray[Any] | None,
    class_names: Sequence[str] | None = None,
    title: str = "",
) -> None:
    """Write the picture atomically, because an existing one is not drawn again."""
    aside = path.with_name(path.name + ".tmp")
    split_figure(partition, labels, class_names, title).savefig(aside, format="png")
    aside.replace(path)


def split_figure(
    partition: Partition,
    labels: npt.NDArray[Any] | None,
    class_names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """The picture itself. `labels`: of each sample of the data set; if they are no classes, only sizes are drawn.

    `class_names`: in ascending order of the classes; by default their numbers.
    """
    facts = heterogeneity(partition, labels)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
    figure = Figure(figsize=(12.5, 5.4), dpi=130, layout=layout, facecolor="white")
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.75, 1), height_ratios=(1.25, 1))
    left = figure.add_subplot(grid[:, 0])
    if labels is None or not are_classes(labels):
        _sizes(left, partition)
    else:
        _classes(figure, left, partition, labels.astype(np.int64), class_names)
    _histogram(figure.add_subplot(grid[0, 1]), partition.sizes)
    _words(figure.add_subplot(grid[1, 1]), facts.lines())
    return figure


def _classes(
    figure: Figure, axes: Axes, partition: Partition, labels: Indices, class_names: Sequence[str] | None
) -> None:
    counts = class_counts(labels, partition.shards)
    names = [str(label) for label in np.unique(labels)] if class_names is None else list(class_names)
    are_few = partition.n_clients <= BARS_MAX
    if are_few and len(names) <= len(_MUTED):
        _bars(axes, counts, names)
    else:
        _map(figure, axes, counts, names)
    if are_few:
        _name_clients(axes, partition)


def _bars(axes: Axes, counts: Indices, names: list[str]) -> None:
    """Bars of samples; if sizes differ too much, of shares, with the numbers of samples above."""
    sizes = counts.sum(1)
    are_shares = _are_far_apart(sizes)
    heights = counts / np.maximum(sizes, 1)[:, None] if are_shares else counts.astype(np.float64)
    x, bottom = np.arange(len(counts)), np.zeros(len(counts))
    for column, name in enumerate(names):
        axes.bar(x, heights[:, column], 0.86, bottom, color=_MUTED[column], edgecolor="white", lw=0.4, label=name)
        bottom += heights[:, column]
    axes.set_xlim(-0.6, len(counts) - 0.4)
    if are_shares:
        axes.set_ylim(0, 1.13)
        axes.set_yticks(np.linspace(0, 1, 6))
        for client, size in enumerate(sizes.tolist()):
            axes.text(client, 1.015, f"{size:,}", rotation=90, ha="center", va="bottom", fontsize=7.5, color=INK)
    else:
        axes.set_ylim(0, bottom.max() * 1.02)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], title="class", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False,
        fontsize=9, title_fontsize=9, handlelength=1, handleheight=1,
    )  # fmt: skip
    dress(axes, _SHARES if are_shares else "Who holds which classes (samples)", "client")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0) if are_shares else _whole())


def _map(figure: Figure, axes: Axes, counts: Indices, names: list[str]) -> None:
    """Few clients in their order; many sorted by their commonest class and size."""
    are_few = len(counts) <= BARS_MAX
    order = np.arange(len(counts)) if are_few else np.lexsort((-counts.sum(1), counts.argmax(1)))
    columns = _columns(counts[order] / np.maximum(counts[order].sum(1), 1)[:, None])
    left = -0.5 if are_few else 0.0
    image = axes.imshow(
        columns.T, cmap=_MAP, norm=Normalize(0, max(float(columns.max()), 1e-9)), aspect="auto", origin="lower",
        interpolation="nearest", extent=(left, left + len(counts), -0.5, len(names) - 0.5),
    )  # fmt: skip
    _share_bar(figure, axes, image)
    step = -(-len(names) // _NAMES_MAX)
    axes.set_yticks(range(0, len(names), step), names[::step])
    many = f"clients, by their commonest class and size{_per_column(len(counts))}"
    dress(axes, _SHARES, "client" if are_few else many, grid=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(_whole())
    axes.set_ylabel("class", color=FAINT, fontsize=9.5)


def _share_bar(figure: Figure, axes: Axes, image: ScalarMappable) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30, format=PercentFormatter(1.0, decimals=0))
    bar.ax.tick_params(colors=FAINT, labelcolor=INK, labelsize=8.5)
    bar.outline.set_visible(False)


def _columns(rows: Floats) -> Floats:
    """At most as many rows as fit the picture, each the mean of neighbours."""
    if len(rows) <= COLUMNS_MAX:
        return rows
    starts = np.linspace(0, len(rows), COLUMNS_MAX, endpoint=False).astype(np.int64)
    sums: Floats = np.add.reduceat(rows, starts)
    return sums / np.diff(starts, append=len(rows))[:, None]


def _per_column(n_clients: int) -> str:
    return "" if n_clients <= COLUMNS_MAX else f"; a column is the mean of {n_clients / COLUMNS_MAX:.0f}"


def _sizes(axes: Axes, partition: Partition) -> None:
    """The sizes of clients, without classes; of many clients, from the largest to the smallest."""
    sizes = partition.sizes
    if len(sizes) <= BARS_MAX:
        axes.bar(np.arange(len(sizes)), sizes, 0.86, color=_ONE_COLOR)
        axes.set_xlim(-0.6, len(sizes) - 0.4)
        dress(axes, "How many samples each client holds", "client")
        _name_clients(axes, partition)
    else:
        edges = np.arange(len(sizes) + 1)
        axes.stairs(np.sort(sizes)[::-1], edges, fill=True, color=_ONE_COLOR)
        axes.set_xlim(0, len(sizes))
        dress(axes, "How many samples clients hold", "clients, the largest first")
        axes.xaxis.set_major_formatter(_whole())
    if _are_far_apart(sizes):
        axes.set_yscale("log")
        axes.set_ylim(max(float(sizes.min()), 1.0) / 2)
    axes.yaxis.set_major_formatter(_whole())


def _name_clients(axes: Axes, partition: Partition) -> None:
    if partition.names is None:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    names = [_shortened(name) for name in partition.names]
    are_upright = sum(map(len, names)) > 60
    axes.set_xticks(range(len(names)), names, rotation=90 if are_upright else 0, fontsize=7.5 if are_upright else 9)
    axes.set_xlabel("")


def _shortened(name: str) -> str:
    """A name without its middle, because names often differ at the end."""
    half = _LETTERS_MAX // 2
    return name if len(name) <= _LETTERS_MAX else f"{name[: half - 1]}…{name[-half:]}"


def _histogram(axes: Axes, sizes: Indices) -> None:
    if _are_far_apart(sizes):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.hist(sizes, bins=_edges(sizes), color=_ONE_COLOR, edgecolor="white", lw=0.5)
    if sizes.min() == sizes.max():
        axes.set_xlim(sizes[0] - 3, sizes[0] + 3)  # one bar, not a wall
    dress(axes, "How large clients are", "samples of a client")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_formatter(_whole())
    axes.xaxis.set_major_formatter(_whole())
    axes.set_ylabel("clients", color=FAINT, fontsize=9.5)


def _edges(sizes: Indices) -> list[float]:
    """Edges between whole numbers. If sizes are far apart, the width of bins grows."""
    low, high = int(sizes.min()), int(sizes.max())
    if not _are_far_apart(sizes):
        width = -(-(high - low + 1) // _BINS_MAX)
        return [low - 0.5 + width * number for number in range((high - low) // width + 2)]
    edges, growth = [max(low, 1)], (high / max(low, 1)) ** (1 / _BINS_MAX) - 1
    while edges[-1] <= high:
        edges.append(edges[-1] + max(1, round(edges[-1] * growth)))
    return [edge - 0.5 for edge in edges]


def _are_far_apart(sizes: Indices) -> bool:
    return int(sizes.max()) > _SPREAD * max(int(sizes.min()), 1)


def _whole() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{value:,.0f}")


def _words(axes: Axes, lines: tuple[str, ...]) -> None:
    axes.axis("off")
    axes.text(0, 1, "\n".join(lines), va="top", fontsize=9, color=INK, linespacing=1.6, transform=axes.transAxes)
