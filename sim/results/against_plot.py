"""`recorded.png`: simulations beside the record that their fleet is made of."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from umbel.aggregation.run.trace import Trace
from umbel.sim.recorded.against_trace import AGAIN, RECORDED, AgainstTrace
from umbel.sim.recorded.courses import went_in
from umbel.sim.results.plot import COLOURS, as_drawn, dress
from umbel.sim.results.plot_style import INK, as_percent, new_figure
from umbel.sim.results.results import Results

_POINTS_MAX = 6


def beside_the_record(results: Results) -> Figure:
    """The picture: a row for each trace. Of a sweep of more than six points, the first ones."""
    n_rows = len(results.against)
    figure = new_figure(12.5, 0.6 + 4.0 * n_rows, f"{results.name}: beside the record")
    for row, one in enumerate(results.against):
        _reports(figure.add_subplot(n_rows, 2, 2 * row + 1), one)
        _closings(figure.add_subplot(n_rows, 2, 2 * row + 2), one, results)
    return figure


def _reports(axes: Axes, one: AgainstTrace) -> None:
    """Of all that were asked: who has not reported is never counted, so a curve ends below one."""
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
    """What share of `n` has happened by each of these moments."""
    times = np.concatenate([[0.0], np.sort(np.array(seconds, dtype=np.float64))])
    style = (0, (4, 2)) if dashed else "-"
    axes.step(times, np.arange(len(times)) / max(1, n), where="post", color=colour, lw=1.8, ls=style, label=label)
    axes.set_ylim(0, 1.02)
