"""What `umbel bench window` measured, as a picture: for each fleet how much client time was of use, and the windows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from umbel.sim.bench.window.bench import WindowContest, goodput
from umbel.sim.bench.window.fleets import EVERY_S, WindowRun
from umbel.sim.results.plot_style import FAINT, INK, dress, new_figure, write_figure

_TUNED, _STATIC, _BEST, _NIGHT = "#0f7b6c", "#c8871e", "#44546a", "#eef2f7"
_SMOOTHED = 12  # rounds, six hours


def draw(contests: Sequence[WindowContest], path: Path) -> None:
    """Write the picture. Raises `OSError` if that cannot be done."""
    figure = new_figure(13, 6.6, "A window that tunes itself, against the static 130 % rule")
    grid = figure.subplots(2, len(contests), sharex=True, squeeze=False)
    for i, contest in enumerate(contests):
        _use(grid[0][i], contest)
        _windows(grid[1][i], contest)
    grid[0][0].set_ylabel("client time of use", color=FAINT)
    grid[1][0].set_ylabel("window (static: the longest allowed)", color=FAINT)
    write_figure(figure, path)


def _use(axes: Axes, contest: WindowContest) -> None:
    lines = ((contest.static, _STATIC, "static 130 %"), (contest.tuned, _TUNED, "self-tuned"))
    for runs, color, name in lines:
        hours, shares = _smoothed(runs[0])
        axes.plot(hours, shares, color=color, lw=2.2, label=f"{name}: {goodput(runs):.1%}")
    best = goodput(contest.best)
    axes.axhline(best, color=_BEST, lw=1.2, ls=(0, (5, 3)), label=f"best static, in hindsight: {best:.1%}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0.4, 1.02)
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, handlelength=1.6)
    _dress(axes, contest, contest.fleet.name)


def _windows(axes: Axes, contest: WindowContest) -> None:
    attempts = contest.tuned[0].attempts
    hours = [attempt.round * EVERY_S / 3600 for attempt in attempts]
    axes.step(hours, [attempt.window_s for attempt in attempts], where="post", color=_TUNED, lw=1.4)
    axes.axhline(contest.window_s, color=_STATIC, lw=1.8)
    axes.axhline(contest.hindsight.window_s, color=_BEST, lw=1.2, ls=(0, (5, 3)))
    asked = np.mean([attempt.over_selection for attempt in attempts[len(attempts) // 4 :]])
    words = f"asks {asked:.0%} of the target (hindsight: {contest.hindsight.over_selection:.0%})"
    axes.text(0.02, 0.04, words, transform=axes.transAxes, fontsize=8.5, color=INK)
    axes.set_ylim(0, contest.window_s * 1.08)
    axes.yaxis.set_major_formatter("{x:.0f} s")
    axes.set_xlabel("virtual hours; nights are shaded", color=FAINT, fontsize=9)
    _dress(axes, contest, "")


def _smoothed(run: WindowRun) -> tuple[list[float], list[float]]:
    """Hours, and the share of use over the last few attempts at each."""
    attempts = run.attempts
    hours = [attempt.round * EVERY_S / 3600 for attempt in attempts]
    wasted, total = (np.cumsum([0.0, *(getattr(a, name) for a in attempts)]) for name in ("wasted_s", "busy_s"))
    first = np.maximum(np.arange(1, len(attempts) + 1) - _SMOOTHED, 0)
    return hours, list(1 - (wasted[1:] - wasted[first]) / (total[1:] - total[first]))


def _dress(axes: Axes, contest: WindowContest, title: str) -> None:
    last = contest.tuned[0].attempts[-1].round * EVERY_S / 3600
    for midnight in range(0, int(last) + 24, 24):
        axes.axvspan(midnight - 3, midnight + 9, color=_NIGHT, lw=0, zorder=0)  # the middle of the night is 3 o'clock
    axes.set_xlim(0, last)
    axes.set_xticks(range(0, int(last) + 1, 24))
    dress(axes, title, axes.get_xlabel())
