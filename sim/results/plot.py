"""`curves.png`: an experiment in one picture: accuracy over rounds, uploads and virtual time, and participation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from umbel.sim.experiment.trials import Estimate, TrialResult
from umbel.sim.federation.rows import Row
from umbel.sim.results.plot_style import FAINT, INK, as_percent, new_figure
from umbel.sim.results.results import Results
from umbel.sim.results.shown import unit_of

Floats = NDArray[np.float64]
# Okabe and Ito's colours, which colour-blind people tell apart; then the same, dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_PARTS = (("counted", "#009e73"), ("partial work", "#e69f00"), ("not in time", "#b8c4cf"))
SHOWN_MAX = 14
_BAND_SEEDS_MIN = 3  # with two, Student's interval would hide all lines
_ALIKE = 8.0  # if run times differ by a larger factor, the scale is logarithmic
_TITLE_CHARACTERS = 100  # that fit above the picture
_LEGEND_CHARACTERS, _LEGEND_HANDLE = 190, 10  # that fit beside each other below the picture


@dataclass(frozen=True, slots=True)
class Quantity:
    """What lines show of a row; None if it was not measured. `is_share`: it lies between 0 and 1."""

    of: Callable[[Row], float | None]
    is_share: bool


ACCURACY = Quantity(lambda row: row.accuracy, is_share=True)
LOSS = Quantity(lambda row: row.loss, is_share=False)


def curves(results: Results) -> Figure:
    """The picture, with at most 14 points of a sweep."""
    figure = new_figure(12.5, 8.2, _title(results))
    grid = figure.add_gridspec(2, 2)
    groups = list(results.by_point.items())[:SHOWN_MAX]
    over_rounds = figure.add_subplot(grid[0, 0])
    draw_lines(over_rounds, groups, lambda row, _: float(row.round), "accuracy on the test set, over rounds", "round")
    over_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
    up = figure.add_subplot(grid[0, 1])
    draw_lines(up, groups, lambda _, so_far: so_far / 1e6, "over what all clients have uploaded", "MB")
    hours = figure.add_subplot(grid[1, 0])
    unit = unit_of(_lengths_s(groups))
    draw_lines(hours, groups, lambda row, _: row.now_s / unit.seconds, "over virtual time", unit.name)
    if len(groups) > 1 and max(_lengths_s(groups)) > _ALIKE * min(_lengths_s(groups)):
        on_log_scale(hours)
    for axes in (over_rounds, up, hours):
        draw_target(axes, results.target_accuracy)
    handles, labels = over_rounds.get_legend_handles_labels()
    if len(groups) > 1:  # below the picture, where it hides no line
        n_columns = max(1, _LEGEND_CHARACTERS // (max(map(len, labels), default=0) + _LEGEND_HANDLE))
        figure.legend(
            handles, labels, frameon=False, fontsize=8, labelcolor=INK, loc="outside lower left", ncols=n_columns
        )
    _take_part(figure.add_subplot(grid[1, 1]), groups)
    return figure


def draw_target(axes: Axes, accuracy: float | None) -> None:
    """A line across, with its name."""
    if accuracy is None:
        return
    axes.axhline(accuracy, color=FAINT, lw=1, ls=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"target {accuracy:.0%}",
        (0.0, accuracy),
        xycoords=("axes fraction", "data"),
        xytext=(3, 2),
        textcoords="offset points",
        fontsize=7.5,
        color=FAINT,
    )


def on_log_scale(axes: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers."""
    axes.set_xscale("log")
    axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _lengths_s(groups: Sequence[tuple[str, list[TrialResult]]]) -> list[float]:
    """How long the runs took, in virtual time."""
    return [one.rows[-1].now_s for _, group in groups for one in group if one.rows] or [0.0]


def _title(results: Results) -> str:
    """The best accuracy, and the points that reached it."""
    points = [(point, point.accuracy) for point in results.points if point.accuracy is not None]
    if not points:
        return as_drawn(results.name)
    _, best = max(points, key=lambda one: one[1].mean)
    alike = [point.label for point, accuracy in points if f"{accuracy.mean:.1%}" == f"{best.mean:.1%}"]
    title = f"{results.name}: {_in_words(best)}"
    if len(points) == 1:
        return as_drawn(title)
    whole = f"{title} with {' and with '.join(alike)}"
    return as_drawn(whole if len(whole) <= _TITLE_CHARACTERS else f"{title} with {len(alike)} of {len(points)}")


def _in_words(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.1%}"
    return f"{estimate.mean:.1%} ± {(estimate.high - estimate.low) / 2:.1%} over {estimate.n} seeds"


def draw_lines(
    axes: Axes,
    groups: Sequence[tuple[str, list[TrialResult]]],
    place: Callable[[Row, int], float],
    title: str,
    unit: str,
    what: Quantity = ACCURACY,
) -> None:
    """A line for each point: the mean over its seeds, with a confidence band for three or more.

    `place`: the x value of a row, which also gets the bytes uploaded by then.
    """
    most = 1.0 if what.is_share else math.inf
    for number, (label, group) in enumerate(groups):
        pairs = [line for one in group if len((line := _line(one, place, what))[0])]
        if not pairs:
            continue
        n = min(len(x) for x, _ in pairs)
        x, y = np.stack([x[:n] for x, _ in pairs]).mean(0), np.stack([y[:n] for _, y in pairs])
        colour, dash = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else (0, (4, 2))
        marker = "o" if n == 1 else None
        axes.plot(x, y.mean(0), color=colour, lw=2, ls=dash, marker=marker, label=as_drawn(label) or None, zorder=3)
        if len(y) >= _BAND_SEEDS_MIN:
            bounds = [Estimate.of(column.tolist()) for column in y.T]
            low = [b.low if b is not None and b.low is not None else np.nan for b in bounds]
            high = [b.high if b is not None and b.high is not None else np.nan for b in bounds]
            axes.fill_between(
                x, np.clip(low, 0, most), np.clip(high, 0, most), color=colour, alpha=0.18, lw=0, zorder=2
            )
    dress(axes, title, unit)
    if what.is_share:
        axes.yaxis.set_major_formatter(FuncFormatter(as_percent))


def _line(one: TrialResult, place: Callable[[Row, int], float], what: Quantity) -> tuple[Floats, Floats]:
    x, y, so_far = list[float](), list[float](), 0
    for row in one.rows:
        so_far += row.bytes_up
        if (value := what.of(row)) is not None:
            x.append(place(row, so_far))
            y.append(value)
    return np.array(x), np.array(y)


def _take_part(axes: Axes, groups: Sequence[tuple[str, list[TrialResult]]]) -> None:
    """How many of the asked clients counted: in each attempt of one point, or on average for several points."""
    if len(groups) == 1:
        rows = [row for row in groups[0][1][0].rows if row.selected]
        x = np.arange(1, len(rows) + 1, dtype=np.float64)
        unit, title = "attempt", "clients asked, and their outcome"
        if len(groups[0][1]) > 1:
            title += f" (seed {groups[0][1][0].trial.seed})"
        shares = np.array([_parts(row) for row in rows], dtype=np.float64).reshape(-1, 3)
    else:
        x = np.arange(len(groups), dtype=np.float64)
        unit, title = "", "clients asked in an attempt, and their outcome, on average"
        means = [[_parts(row) for one in group for row in one.rows if row.selected] for _, group in groups]
        shares = np.array([np.mean(one, axis=0) if one else np.zeros(3) for one in means])
        axes.set_xticks(
            x, [as_drawn(label) for label, _ in groups], rotation=20, ha="right", rotation_mode="anchor", fontsize=7
        )
    bottom = np.zeros(len(x))
    for (name, colour), height in zip(_PARTS, shares.T, strict=True):
        axes.bar(x, height, 0.85, bottom=bottom, color=colour, label=name, lw=0, zorder=2)
        bottom += height
    axes.set_ylim(0, max(1.0, float(bottom.max(initial=1.0))) * 1.18)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left", labelcolor=INK)
    dress(axes, title, unit)
    if len(groups) == 1:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _parts(row: Row) -> tuple[int, int, int]:
    counted = row.reported if row.committed else 0
    partial = row.partial if row.committed else 0
    return counted - partial, partial, row.selected - counted


def as_drawn(label: str) -> str:
    """A label with escaped dollar signs, which matplotlib would read as a formula."""
    return label.replace("$", r"\$")


def dress(axes: Axes, title: str, unit: str) -> None:
    """Title, unit and lines of one of a picture's parts."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(unit, fontsize=9, color=FAINT)
    axes.grid(axis="y", color="#e7ebee", lw=0.8, zorder=0)
    axes.tick_params(colors=FAINT, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c7d0d8")
