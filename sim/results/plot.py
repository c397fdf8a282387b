"""The pictures of an experiment.

- `curves.png`: accuracy over rounds, uploads and virtual time, and participation. Without devices no time passes, and
  the loss is drawn instead.
- `panels.png`: a column for each value of the first swept key, if two are swept. If more are swept, one such picture of
  the others for each value of the first.
- `groups.png`: the scores of natural data holders.
- `recorded.png`: simulations beside the record that their fleet is made of.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.trace import Trace
from umbel.sim.experiment.file import point_label
from umbel.sim.experiment.trials import Estimate, TrialResult
from umbel.sim.federation.rows import Row
from umbel.sim.recorded.against_trace import AGAIN, RECORDED, AgainstTrace, went_in
from umbel.sim.results.findings import Findings
from umbel.sim.results.plot_style import FAINT, INK, as_percent, new_figure
from umbel.sim.results.shown import unit_of

Floats = NDArray[np.float64]
Groups = Sequence[tuple[str, list[TrialResult]]]
# Okabe and Ito's colours, which colour-blind people tell apart; then the same, dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_PARTS = (("counted", "#009e73"), ("partial work", "#e69f00"), ("left out", "#b8c4cf"))
SHOWN_MAX = 14
_BAND_SEEDS_MIN = 3  # with two, Student's interval would hide all lines
_ALIKE = 8.0  # if run times differ by a larger factor, the scale is logarithmic
_TITLE_CHARACTERS = 100  # that fit above the picture
_LEGEND_CHARACTERS, _LEGEND_HANDLE = 190, 10  # that fit beside each other below the picture


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What lines show of a row; None if it was not measured. `is_share`: it lies between 0 and 1."""

    of: Callable[[Row], float | None]
    is_share: bool


_ACCURACY = _Quantity(lambda row: row.accuracy, is_share=True)
_LOSS = _Quantity(lambda row: row.loss, is_share=False)
_ASKED = {
    "training loss of all clients": _Quantity(lambda row: row.train_loss_all, is_share=False),
    "dissimilarity of the clients' updates": _Quantity(lambda row: row.update_dissimilarity, is_share=False),
    "mu of FedProx": _Quantity(lambda row: row.proximal_mu, is_share=False),
}  # by title, what `[measure]` or an adaptive mu may ask for


def curves(results: Findings) -> Figure:
    """The picture, with at most 14 points of a sweep."""
    figure = new_figure(12.5, 8.2, _title(results))
    grid = figure.add_gridspec(2, 2)
    groups = list(results.by_point.items())[:SHOWN_MAX]
    measured = _measured(results)
    over_rounds = figure.add_subplot(grid[0, 0])
    _draw_lines(over_rounds, groups, lambda row, _: float(row.round), f"accuracy{measured}, over rounds", "round")
    over_rounds.xaxis.set_major_locator(MaxNLocator(integer=True))
    up = figure.add_subplot(grid[0, 1])
    _draw_lines(up, groups, lambda _, so_far: so_far / 1e6, "over what all clients have uploaded", "MB")
    third = figure.add_subplot(grid[1, 0])
    if results.has_devices:
        _draw_over_time(third, groups)
    else:
        _draw_lines(third, groups, lambda row, _: float(row.round), f"loss{measured}, over rounds", "round", _LOSS)
    for axes in (over_rounds, up, *([third] if results.has_devices else [])):
        _draw_target(axes, results.target_accuracy)
    handles, labels = over_rounds.get_legend_handles_labels()
    if len(groups) > 1:  # below the picture, where it hides no line
        n_columns = max(1, _LEGEND_CHARACTERS // (max(map(len, labels), default=0) + _LEGEND_HANDLE))
        figure.legend(
            handles, labels, frameon=False, fontsize=8, labelcolor=INK, loc="outside lower left", ncols=n_columns
        )
    _take_part(figure.add_subplot(grid[1, 1]), groups)
    return figure


def _measured(results: Findings) -> str:
    """On what models were measured, if umbel did it: not by the experiment's own clients, or by a Flower app."""
    return "" if any(one.trial.clients or one.trial.flower for one in results.trials) else " on the test set"


def _draw_over_time(axes: Axes, groups: Groups) -> None:
    unit = unit_of(_lengths_s(groups))
    _draw_lines(axes, groups, lambda row, _: row.now_s / unit.seconds, "over virtual time", unit.name)
    if len(groups) > 1 and max(_lengths_s(groups)) > _ALIKE * min(_lengths_s(groups)):
        _on_log_scale(axes)


def _draw_target(axes: Axes, accuracy: float | None) -> None:
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


def _on_log_scale(axes: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers."""
    axes.set_xscale("log")
    axes.tick_params(which="minor", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _lengths_s(groups: Groups) -> list[float]:
    """How long the runs took, in virtual time."""
    return [one.rows[-1].now_s for _, group in groups for one in group if one.rows] or [0.0]


def _title(results: Findings) -> str:
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


def _draw_lines(
    axes: Axes,
    groups: Groups,
    place: Callable[[Row, int], float],
    title: str,
    unit: str,
    what: _Quantity = _ACCURACY,
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
    dress_part(axes, title, unit)
    if what.is_share:
        axes.yaxis.set_major_formatter(FuncFormatter(as_percent))


def _line(one: TrialResult, place: Callable[[Row, int], float], what: _Quantity) -> tuple[Floats, Floats]:
    x, y, so_far = list[float](), list[float](), 0
    for row in one.rows:
        so_far += row.bytes_up
        if (value := what.of(row)) is not None:
            x.append(place(row, so_far))
            y.append(value)
    return np.array(x), np.array(y)


def _take_part(axes: Axes, groups: Groups) -> None:
    """How many of the asked clients counted: in each attempt of one point, or on average for several points."""
    if len(groups) == 1:
        rows = _asking(groups[0][1][0])
        x = np.arange(1, len(rows) + 1, dtype=np.float64)
        unit, title = "attempt", f"clients asked{_for_what(rows)}, and their outcome"
        if len(groups[0][1]) > 1:
            title += f" (seed {groups[0][1][0].trial.seed})"
        shares = np.array([_parts(row) for row in rows], dtype=np.float64).reshape(-1, 3)
    else:
        x = np.arange(len(groups), dtype=np.float64)
        asking = [[row for one in group for row in _asking(one)] for _, group in groups]
        what = _for_what([row for rows in asking for row in rows])
        unit, title = "", f"clients asked{what} in an attempt, and their outcome, on average"
        means = [[_parts(row) for row in rows] for rows in asking]
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
    dress_part(axes, title, unit)
    if len(groups) == 1:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _asking(one: TrialResult) -> list[Row]:
    """The attempts that asked clients: those at training, unless there are none."""
    asking = [row for row in one.rows if row.selected]
    return [row for row in asking if Task(row.task).makes_model] or asking


def _for_what(rows: Sequence[Row]) -> str:
    """ "to train", or "to evaluate", or nothing if these attempts are of both kinds, or there are none."""
    kinds = {Task(row.task) for row in rows}
    words = {Task.TRAINING: " to train", Task.EVALUATION: " to evaluate"}
    return words.get(kinds.pop(), "") if len(kinds) == 1 else ""


def _parts(row: Row) -> tuple[int, int, int]:
    counted = row.reported if row.committed else 0
    partial = row.partial if row.committed else 0
    return counted - partial, partial, row.selected - counted


def as_drawn(label: str) -> str:
    """A label with escaped dollar signs, which matplotlib would read as a formula."""
    return label.replace("$", r"\$")


def dress_part(axes: Axes, title: str, unit: str) -> None:
    """Title, unit and lines of one of a picture's parts."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(unit, fontsize=9, color=FAINT)
    axes.grid(axis="y", color="#e7ebee", lw=0.8, zorder=0)
    axes.tick_params(colors=FAINT, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c7d0d8")


_VALUES_MAX = 5


def panels(results: Findings) -> Mapping[str, Figure]:
    """The pictures; none if fewer than two things are swept.

    Two swept keys make one picture, with the key "": a column for each value of the first, and a line for each of the
    second. Three or more make one for each value of the first, with this value as its key, of the others. Of more than
    five values, the first ones are drawn. Figures that `[measure]` asks for have a row each.
    """
    return {name: _panels(results, columns) for name, columns in _pictures(results).items()}


def _panels(results: Findings, columns: Mapping[str, Groups]) -> Figure:
    quantities = _drawn_quantities(results, columns)
    n_rows = len(quantities) + results.has_devices
    figure = new_figure(1.5 + 3.7 * len(columns), 2.9 * n_rows)
    axes = figure.subplots(n_rows, len(columns), sharey="row", squeeze=False)
    for column, (value, groups) in zip(axes.T, columns.items(), strict=True):
        for row, (title, quantity) in enumerate(quantities.items()):
            whole = title if row else f"{as_drawn(value)}: {title}"
            _draw_lines(column[row], groups, lambda row, _: float(row.round), whole, "round", quantity)
            column[row].xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _draw_target(column[0], results.target_accuracy)
    if results.has_devices:
        _draw_times(axes[-1], list(columns.values()), results)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, fontsize=9, labelcolor=INK, loc="outside upper left", ncols=len(labels)
    )
    return figure


def _drawn_quantities(results: Findings, columns: Mapping[str, Groups]) -> dict[str, _Quantity]:
    """What has a row of panels over rounds, by its title: accuracy and loss, and what the experiment asked for."""
    measured = _measured(results)
    rows = [row for groups in columns.values() for _, group in groups for one in group for row in one.rows]
    asked = {title: what for title, what in _ASKED.items() if any(what.of(row) is not None for row in rows)}
    return {f"accuracy{measured}": _ACCURACY, f"loss{measured}": _LOSS, **asked}


def _draw_times(row: Sequence[Axes], columns: Sequence[Groups], results: Findings) -> None:
    """The accuracy over virtual time, in the last row of the panels."""
    unit = unit_of(one.rows[-1].now_s for one in results.trials if one.rows)
    for axes, groups in zip(row, columns, strict=True):
        _draw_lines(axes, groups, lambda row, _: row.now_s / unit.seconds, "accuracy, over virtual time", unit.name)
        _draw_target(axes, results.target_accuracy)
    _on_one_scale(row)


def _on_one_scale(row: Sequence[Axes]) -> None:
    """Give these the same logarithmic time axis: one column may take a thousand times as long as another."""
    limits = [axes.dataLim.intervalx for axes in row]
    low, high = min(one[0] for one in limits), max(one[1] for one in limits)
    for axes in row:
        _on_log_scale(axes)
        axes.set_xlim(low / 1.2, high * 1.2)


def _pictures(results: Findings) -> Mapping[str, Mapping[str, Groups]]:
    """For each picture, and each value of the key that has its columns, the groups of its lines."""
    found = dict[str, dict[str, list[tuple[str, list[TrialResult]]]]]()
    for group in results.by_point.values():
        swept = list(group[0].trial.point.items())
        if len(swept) < 2:
            return {}
        n_outer = len(swept) > 2
        picture, column, line = (
            point_label(dict(part)) for part in (swept[:n_outer], swept[n_outer : n_outer + 1], swept[n_outer + 1 :])
        )
        found.setdefault(picture, {}).setdefault(column, []).append((line, group))
    return {
        picture: dict(list(columns.items())[:_VALUES_MAX]) for picture, columns in list(found.items())[:_VALUES_MAX]
    }


_APART = 0.8  # of a holder's row, as much is taken by its points


def groups_plot(results: Findings) -> Figure | None:
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
    axes.set_title("accuracy of the last model on each client's held-out data", loc="left", fontsize=10, color=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(points) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


_POINTS_MAX = 6


def beside_the_record(results: Findings) -> Figure:
    """The picture: a row for each trace, with at most six points of a sweep."""
    n_rows = len(results.against)
    figure = new_figure(12.5, 0.6 + 4.0 * n_rows, f"{results.name}: compared with the recorded run")
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
    dress_part(
        axes,
        f"share of asked clients that have reported ({calibration.file})",
        "seconds from the opening of the attempt",
    )
    axes.yaxis.set_major_formatter(FuncFormatter(as_percent))


def _legend_below(axes: Axes) -> None:
    """Where no curve can be."""
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left", bbox_to_anchor=(0.0, -0.14), ncols=2)


def _report_times(traces: Sequence[Trace]) -> tuple[list[float], int]:
    """The times, and how many were asked."""
    attempts = [attempt for trace in traces for attempt in trace.attempts]
    seconds = [float(one.report_s or 0.0) for attempt in attempts for one in attempt.in_time]
    return seconds, sum(len(attempt.clients) for attempt in attempts)


def _closings(axes: Axes, one: AgainstTrace, results: Findings) -> None:
    calibration = one.calibration
    _step(axes, *_open_times([calibration.recorded]), INK, RECORDED)
    if calibration.again:
        _step(axes, *_open_times(calibration.again), COLOURS[0], AGAIN)
    of_other_work = {point.course.label for point in one.points if point.work_unlike}
    fleets = [(group, group[0].trial.fleet) for group in results.by_point.values()]
    shown = [group for group, fleet in fleets if fleet is not None and fleet.recorded == calibration.file]
    for number, group in enumerate(shown[:_POINTS_MAX], 1):
        seconds = [attempt.open_s for run in group for attempt in went_in(run.rows)]
        name = group[0].trial.label or "the experiment"
        label = as_drawn(name) + (" (other work than was recorded)" if name in of_other_work else "")
        _step(axes, seconds, len(seconds), COLOURS[number % len(COLOURS)], label, dashed=True)
    _legend_below(axes)
    dress_part(axes, "share of attempts that have closed", "seconds from the opening of the attempt")
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
