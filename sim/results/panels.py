"""`panels.png`: an experiment in which several things are swept: a column for each value of the first of them."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from umbel.sim.experiment.estimate import unit_of
from umbel.sim.experiment.sweep import point_label
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.results.plot import ACCURACY, LOSS, as_drawn, draw_lines, draw_target, on_log_scale
from umbel.sim.results.plot_style import INK
from umbel.sim.results.results import Results

_COLUMNS_MAX = 5
Groups = Sequence[tuple[str, list[TrialResult]]]


def panels(results: Results) -> Figure | None:
    """The picture, or None where fewer than two things are swept. Of more than five values, the first ones."""
    columns = _columns(results)
    if not columns:
        return None
    unit = unit_of(one.rows[-1].now_s for one in results.trials if one.rows)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.04, wspace=0.03)
    figure = Figure(figsize=(1.5 + 3.7 * len(columns), 8.6), dpi=130, layout=layout, facecolor="white")
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
    """Let these show the same times: logarithmic, for one column may take a thousand times as long as another."""
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
