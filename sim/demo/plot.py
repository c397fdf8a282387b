"""`curves.png`: the demo in one picture: accuracy, participation, the split of the data, and bytes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from umbel.aggregation.run.records import Fate, RoundRecord
from umbel.sim.data.partition.partition import Indices
from umbel.sim.demo.baselines import Baselines
from umbel.sim.demo.board import Board, DemoRound
from umbel.sim.demo.plan import DemoPlan
from umbel.sim.results.plot_style import INK, dress, new_figure

Floats = npt.NDArray[np.float64]
_TOGETHER, _POOLED, _ALONE = "#0b7a75", "#22313f", "#e0a458"
# From bottom to top.
_PARTICIPATION = (
    ("counted", Fate.ACCEPTED, "#0b7a75"),
    ("partial work", Fate.PARTIAL, "#f2b134"),
    ("told to stop", Fate.RELEASED, "#b8c4cf"),
    ("declined", Fate.DECLINED, "#9b72aa"),
    ("lost", Fate.LOST, "#d1495b"),
)
_DISCARDED = ("report discarded", "#d3a99f")
_SLOT = 0.78  # of a round's place on the axis; its attempts share it
_DOWN, _UP = "#5b8db8", "#0b7a75"


@dataclass(frozen=True, slots=True)
class _Bar:
    """The bar of an attempt. Attempts at one round are side by side in the round's place."""

    record: RoundRecord
    x: float
    width: float


def draw_curves(path: Path, board: Board, classes: Indices) -> None:
    """Write the picture. `classes`: samples by client and class, shape (clients, classes)."""
    curves(board, classes).savefig(path)


def curves(board: Board, classes: Indices) -> Figure:
    """The picture itself."""
    plan, rounds, baselines = board.plan, board.rounds, board.baselines
    assert baselines is not None, "it is drawn at the end"
    figure = new_figure(12.5, 8.2, _title(plan, rounds, baselines))
    grid = figure.add_gridspec(2, 2, width_ratios=(1.75, 1), height_ratios=(1.2, 1))
    _accuracy(figure.add_subplot(grid[0, 0]), rounds, baselines)
    _split(figure.add_subplot(grid[0, 1]), plan, classes)
    _participation(figure.add_subplot(grid[1, 0]), rounds, board.coordinator_killed_in)
    _bytes(figure.add_subplot(grid[1, 1]), rounds)
    return figure


def _title(plan: DemoPlan, rounds: list[DemoRound], baselines: Baselines) -> str:
    together = [ended.score.accuracy for ended in rounds if ended.score is not None]
    gain = f"from {baselines.alone_mean:.0%} alone to {together[-1]:.1%} together" if together else "no model was made"
    return f"{len(plan.clients)} clinics, {gain}, and no image left its clinic"


def _accuracy(axes: Axes, rounds: list[DemoRound], baselines: Baselines) -> None:
    scored = [(ended.record.round, ended.score.accuracy) for ended in rounds if ended.score is not None]
    x, y = [i for i, _ in scored], [accuracy for _, accuracy in scored]
    low, high = min(baselines.alone), max(baselines.alone)
    axes.axhspan(low, high, color=_ALONE, alpha=0.22, lw=0)
    axes.axhline(baselines.alone_mean, color=_ALONE, lw=1.5)
    axes.axhline(baselines.pooled, color=_POOLED, lw=1.3, ls=(0, (5, 3)))
    axes.plot(x, y, color=_TOGETHER, lw=2.6, marker="o", ms=4.5, mfc="white", mew=1.6, clip_on=False, zorder=5)
    _over_rounds(axes, rounds)
    axes.set_ylim(min(low, *y, 0.3) - 0.03, 1.06)
    right = _last(rounds) + 0.4
    alone = f"each clinic alone: mean {baselines.alone_mean:.1%} ({low:.0%} to {high:.0%})"
    _label(axes, right, baselines.alone_mean - 0.012, alone, "#9a6a1f", "top")
    pooled = f"all data in one place: {baselines.pooled:.1%}"
    _label(axes, 0.65, baselines.pooled + 0.008, pooled, _POOLED, "bottom", ha="left")
    if y:
        _label(axes, right, min(y[-1], baselines.pooled) - 0.03, f"together: {y[-1]:.1%}", _TOGETHER, "top")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _dress_rounds(axes, "Accuracy on digits that no clinic has seen")


def _label(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    color: str,
    va: Literal["top", "bottom"],
    ha: Literal["left", "right"] = "right",
) -> None:
    axes.text(x, y, text, color=color, ha=ha, va=va, fontsize=10, fontweight="bold", zorder=6)


def _participation(axes: Axes, rounds: list[DemoRound], killed_in: int | None) -> None:
    bars = _bars(rounds)
    x, width = [bar.x for bar in bars], [bar.width for bar in bars]
    heights = np.zeros(len(bars))
    for label, color, counts in _layers([bar.record for bar in bars]):
        axes.bar(x, counts, bottom=heights, width=width, color=color, label=label)
        heights += counts
    _hatch([(bar, height) for bar, height in zip(bars, heights, strict=True) if not bar.record.committed], axes)
    _over_rounds(axes, rounds)
    top = max([*heights, 1.0])
    axes.set_ylim(0, top * 1.22)
    legend = axes.legend(loc="upper left", ncols=7, fontsize=9, handlelength=1, columnspacing=1.2, borderpad=0)
    legend.get_frame().set(edgecolor="none", alpha=1.0)  # no grid line runs through it
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for bar, height in zip(bars, heights, strict=True):
        if bar.record.round == killed_in and bar.record.committed:
            _point(axes, "coordinator killed", (bar.x, height), (bar.x + 0.5, top * 1.02))
    _dress_rounds(axes, "Who took part in each round")


def _hatch(failed: list[tuple[_Bar, float]], axes: Axes) -> None:
    """Over the bars of abandoned attempts."""
    if failed:
        x, heights, width = zip(*((bar.x, height, bar.width) for bar, height in failed), strict=True)
        axes.bar(x, heights, width=width, label="abandoned attempt", fill=False, hatch="////", edgecolor=INK, lw=0.6)


def _point(axes: Axes, text: str, at: tuple[float, float], text_at: tuple[float, float]) -> None:
    arrow = {"arrowstyle": "->", "color": INK, "relpos": (0, 0.5)}
    axes.annotate(text, at, text_at, fontsize=9, color=INK, ha="left", va="bottom", arrowprops=arrow)


def _bars(rounds: list[DemoRound]) -> list[_Bar]:
    attempts = Counter(ended.record.round for ended in rounds)
    bars, before = list[_Bar](), Counter[int]()
    for record in (ended.record for ended in rounds):
        width = _SLOT / attempts[record.round]
        bars.append(_Bar(record, record.round - _SLOT / 2 + (before[record.round] + 0.5) * width, width))
        before[record.round] += 1
    return bars


def _layers(records: list[RoundRecord]) -> Iterator[tuple[str, str, Floats]]:
    """The layers of the bars, from the bottom up: label, colour, and number of clients at each attempt.

    Records of an abandoned attempt call all clients released; those that had reported have their own layer.
    """
    discarded = np.array([0 if record.committed else record.reported for record in records], np.float64)
    for label, fate, color in _PARTICIPATION:
        counts = np.array([_count(record, fate) for record in records], np.float64)
        if fate is Fate.RELEASED:
            if discarded.any():
                yield (*_DISCARDED, discarded)
            counts -= discarded
        if counts.any() or fate in (Fate.ACCEPTED, Fate.PARTIAL):
            yield label, color, counts


def _count(record: RoundRecord, fate: Fate) -> int:
    """How many clients of an attempt had this fate. A secure attempt knows only the number of partial reports."""
    counted = sum(client.fate is fate for client in record.clients)
    hidden = record.partial - sum(client.fate is Fate.PARTIAL for client in record.clients) if record.committed else 0
    return counted + {Fate.PARTIAL: hidden, Fate.ACCEPTED: -hidden}.get(fate, 0)


def _last(rounds: list[DemoRound]) -> int:
    return max((ended.record.round for ended in rounds), default=1)


def _over_rounds(axes: Axes, rounds: list[DemoRound]) -> None:
    axes.set_xlim(0.5, _last(rounds) + 0.5)


def _split(axes: Axes, plan: DemoPlan, classes: Indices) -> None:
    axes.imshow(classes, cmap="GnBu", aspect="auto", vmin=0)
    for (row, column), count in np.ndenumerate(classes):
        if count:
            color = "white" if count > 0.6 * classes.max() else INK
            axes.text(column, row, str(count), ha="center", va="center", fontsize=7.5, color=color)
    axes.set_xticks(range(classes.shape[1]), [str(digit) for digit in range(classes.shape[1])])
    axes.set_yticks(range(len(plan.clients)), [client.name for client in plan.clients])
    dress(axes, "Who holds which digits (samples)", "digit", grid=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _bytes(axes: Axes, rounds: list[DemoRound]) -> None:
    x = np.arange(1, _last(rounds) + 1)
    down, up = (_megabytes(rounds, name) for name in ("bytes_down", "bytes_up"))
    axes.bar(x - 0.2, down, width=0.4, color=_DOWN, label=f"models to clinics, {down.sum():.1f} MB in all")
    axes.bar(x + 0.2, up, width=0.4, color=_UP, label=f"updates from clinics, {up.sum():.1f} MB in all")
    _over_rounds(axes, rounds)
    axes.set_ylim(0, max([*down, *up, 1e-9]) * 1.32)
    axes.legend(loc="upper left", frameon=False, fontsize=9, handlelength=1, borderpad=0)
    _dress_rounds(axes, "MB on the wire in each round")


def _megabytes(rounds: list[DemoRound], name: str) -> Floats:
    """By round, all its attempts together."""
    sums = np.zeros(_last(rounds))
    for ended in rounds:
        sums[ended.record.round - 1] += getattr(ended.record, name) / 1e6
    return sums


def _dress_rounds(axes: Axes, title: str) -> None:
    dress(axes, title, "round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
