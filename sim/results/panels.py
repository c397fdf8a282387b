"""The pictures beside `curves.png`: `panels.png` if several things are swept, `groups.png` with the scores of natural
data holders, and `recorded.png` with simulations beside the record that their fleet is made of.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from umbel.aggregation.run.trace import Trace
from umbel.sim.experiment.sweep import point_label
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.recorded.against_trace import AGAIN, RECORDED, AgainstTrace
from umbel.sim.recorded.courses import went_in
from umbel.sim.results.plot import (
    ACCURACY,
    COLOURS,
    LOSS,
    SHOWN_MAX,
    as_drawn,
    draw_lines,
    draw_target,
    dress,
    on_log_scale,
)
from umbel.sim.results.plot_style import FAINT, INK, as_percent, new_figure
from umbel.sim.results.results import Results
from umbel.sim.results.shown import unit_of

_COLUMNS_MAX = 5
Groups = Sequence[tuple[str, list[TrialResult]]]


def panels(results: Results) -> Figure | None:
    """The picture, or None where fewer than two things are swept. Of more than five values, the first ones."""
    columns = _columns(results)
    if not columns:
        return None
    unit = unit_of(one.rows[-1].now_s for one in results.trials if one.rows)
    figure = new_figure(1.5 + 3.7 * len(columns), 8.6)
    axes = figure.subplots(3, len(columns), sharey="row", squeeze=False)
    for column, (value, groups) in zip(axes.T, columns.items(), strict=True):
        draw_lines(
            column[0], groups, lambda row, _: float(row.round), f"{as_drawn(value)}: accuracy on the test set", "round"
        )
        draw_lines(column[1], groups, lambda row, _: float(row.round), "loss on the test set", "round", LOSS)
        draw_lines(
            column[2],
            groups,
            lambda row, _: row.now_s / unit.seconds,
            "accuracy, over virtual time",
            unit.name,
            ACCURACY,
        )
        for one in column[:2]:
            one.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for one in (column[0], column[2]):
            draw_target(one, results.target_accuracy)
    _on_one_scale(axes[2])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, fontsize=9, labelcolor=INK, loc="outside upper left", ncols=len(labels)
    )
    return figure


def _on_one_scale(row: Sequence[Axes]) -> None:
    """Give these the same logarithmic time axis: one column may take a thousand times as long as another."""
    limits = [axes.dataLim.intervalx for axes in row]
    low, high = min(one[0] for one in limits), max(one[1] for one in limits)
    for axes in row:
        on_log_scale(axes)
        axes.set_xlim(low / 1.2, high * 1.2)


def _columns(results: Results) -> Mapping[str, Groups]:
    """By the first swept key and its value, what else is swept; empty where that is nothing."""
    found = dict[str, list[tuple[str, list[TrialResult]]]]()
    for group in results.by_point.values():
        first, *others = group[0].trial.point.items() or [("", "")]
        if not others:
            return {}
        found.setdefault(point_label(dict([first])), []).append((point_label(dict(others)), group))
    return dict(list(found.items())[:_COLUMNS_MAX])


_APART = 0.8  # of a holder's row, as much is taken by its points


def groups_plot(results: Results) -> Figure | None:
    """A row for each holder, a dot for each point of the sweep, with its confidence interval where there are several
    seeds; None where nobody holds data by nature.
    """
    points = [point for point in results.points if point.groups][:SHOWN_MAX]
    if not points:
        return None
    names = list(points[0].groups)
    figure = new_figure(9.5, 1.6 + 0.9 * len(names))
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


_POINTS_MAX = 6


def beside_the_record(results: Results) -> Figure:
    """The picture: a row for each trace, with at most six points of a sweep."""
    n_rows = len(results.against)
    figure = new_figure(12.5, 0.6 + 4.0 * n_rows, f"{results.name}: beside the record")
    for row, one in enumerate(results.against):
        _reports(figure.add_subplot(n_rows, 2, 2 * row + 1), one)
        _closings(figure.add_subplot(n_rows, 2, 2 * row + 2), one, results)
    return figure


def _reports(axes: Axes, one: AgainstTrace) -> None:
    """Shares of all asked clients, so a curve ends below one."""
    calibration = one.calibration
    _step(axes, *_report_times([calibration.recorded]), INK, RECORDED)
    if calibration.again:
        _step(axes, *_report_times(calibration.again), COLOURS[0], AGAIN)
    _legend_below(axes)
    dress(axes, f"clients asked that have reported by then ({calibration.file})", "seconds from the opening")
    axes.yaxis.set_major_formatter(FuncFormatter(as_percent))


def _legend_below(axes: Axes) -> None:
    """Where no curve can be."""
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left", bbox_to_anchor=(0.0, -0.14), ncols=2)


def _report_times(traces: Sequence[Trace]) -> tuple[list[float], int]:
    """The times, and how many were asked."""
    attempts = [attempt for trace in traces for attempt in trace.attempts]
    seconds = [float(one.report_s or 0.0) for attempt in attempts for one in attempt.in_time]
    return seconds, sum(len(attempt.clients) for attempt in attempts)


def _closings(axes: Axes, one: AgainstTrace, results: Results) -> None:
    calibration = one.calibration
    _step(axes, *_open_times([calibration.recorded]), INK, RECORDED)
    if calibration.again:
        _step(axes, *_open_times(calibration.again), COLOURS[0], AGAIN)
    of_other_work = {point.course.label for point in one.points if point.work_unlike}
    shown = [group for group in results.by_point.values() if group[0].trial.fleet.recorded == calibration.file]
    for number, group in enumerate(shown[:_POINTS_MAX], 1):
        seconds = [attempt.open_s for run in group for attempt in went_in(run.rows)]
        name = group[0].trial.label or "the experiment"
        label = as_drawn(name) + (" (other work than was recorded)" if name in of_other_work else "")
        _step(axes, seconds, len(seconds), COLOURS[number % len(COLOURS)], label, dashed=True)
    _legend_below(axes)
    dress(axes, "attempts that have closed by then", "seconds from the opening")
    axes.yaxis.set_major_formatter(FuncFormatter(as_percent))


def _open_times(traces: Sequence[Trace]) -> tuple[list[float], int]:
    seconds = [attempt.open_s for trace in traces for attempt in trace.attempts]
    return seconds, len(seconds)


def _step(axes: Axes, seconds: list[float], n: int, colour: str, label: str, *, dashed: bool = False) -> None:
    """The share of `n` that has happened by each moment."""
    times = np.concatenate([[0.0], np.sort(np.array(seconds, dtype=np.float64))])
    style = (0, (4, 2)) if dashed else "-"
    axes.step(times, np.arange(len(times)) / max(1, n), where="post", color=colour, lw=1.8, ls=style, label=label)
    axes.set_ylim(0, 1.02)
