"""The pictures of the benchmarks. Each `draw_...` writes one; it raises `OSError` if that cannot be done."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from umbel.aggregation.codec.vectors.buckets import Qsgd, Sign, Ternary
from umbel.aggregation.codec.vectors.codec import Sketching, VectorCodec
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.sparse import RandomMask, TopK
from umbel.sim.bench.codec.bench import (
    AT_ENTROPY,
    CodecPoint,
    entropy_coded,
    fixed_width_error,
    gaussian,
    mean_by,
    mean_points,
    real_updates,
    shannon,
    vector_codec,
)
from umbel.sim.bench.codec.training import CodecContest, Scored
from umbel.sim.bench.report import BenchRow, Report
from umbel.sim.bench.secagg.bench import update_bytes
from umbel.sim.bench.simulate.cohorts import ENGINES, CohortPoint
from umbel.sim.bench.window import EVERY_S, WindowContest, WindowRun, goodput
from umbel.sim.results.plot_style import FAINT, GRID, INK, dress, dress_bench, new_figure, write_figure

_OURS, _PEER, _LIMIT, _SLATE = "#0f7b6c", "#c8871e", "#a9b4bd", "#44546a"


# --- umbel bench codec --plot: error against bits, of Gaussian values and of real updates' mean

_BITS = range(1, 9)


def draw_codec_errors(path: Path) -> None:
    figure = new_figure(13, 5.6, "Error against bits: integers on a shared step")
    left, right = figure.subplots(1, 2)
    _gaussian(left)
    _real(right)
    write_figure(figure, path)


def _gaussian(axes: Axes) -> None:
    values = gaussian(1 << 20)
    coded = [entropy_coded(values, bits) for bits in _BITS]
    fixed = [CodecPoint("", bits, fixed_width_error(values, bits)) for bits in _BITS]
    eden = [vector_codec(Eden(bits), values, "") for bits in _BITS]
    axes.plot(_BITS, [shannon(bits) for bits in _BITS], color=FAINT, lw=1.2, ls=":", label="Shannon's bound")
    axes.plot(_BITS, list(AT_ENTROPY.values()), color=FAINT, lw=1.2, ls="--", label="scalar bound, entropy coded")
    _line(axes, eden, _PEER, "EDEN")
    _line(axes, fixed, "#5aa897", "integers, fixed width")
    _line(axes, coded, _OURS, "integers, entropy coded, as sent")
    axes.set_yscale("log")
    dress_bench(axes, "Gaussian values: any update, once rotated", "bits a coordinate", "vNMSE")


def _real(axes: Axes) -> None:
    updates = real_updates()
    _line(axes, [mean_by(Eden(bits), updates, "") for bits in (1, 2, 3, 4, 5)], _PEER, "EDEN")
    _line(axes, mean_points(), _OURS, "integers, entropy coded")
    others: tuple[tuple[str, VectorCodec], ...] = (
        ("sign", Sign()),
        ("TernGrad", Ternary()),
        ("QSGD", Qsgd(levels=16)),
        ("top 5 %", TopK(share=0.05)),
        ("random mask, 1 in 10", RandomMask(every=10, mode=Sketching.SKETCHED)),
    )
    for name, codec in others:
        point = mean_by(codec, updates, name)
        axes.plot(point.bits, point.error, "o", color=_SLATE, ms=5)
        axes.annotate(name, (point.bits, point.error), (5, 4), textcoords="offset points", fontsize=8.5, color=_SLATE)
    axes.set_xlim(0, 7.5)
    axes.set_yscale("log")
    dress_bench(
        axes, "The mean of 20 real updates, two digits each", "bits a coordinate on the wire", "NMSE of the mean"
    )


def _line(axes: Axes, points: Sequence[CodecPoint], color: str, name: str) -> None:
    axes.plot([p.bits for p in points], [p.error for p in points], "o-", color=color, lw=2, ms=4, label=name)


# --- umbel bench codec --curves: accuracy against uploaded bytes, a panel for each federation, a line for each codec

# By the codec's name, a shade for each contender that uses it.
_SHADES: Mapping[str, Sequence[str]] = {
    "float32": ("#111111",),
    "planes": ("#7b8794", "#a9b4bf"),
    "integer": ("#b4e3da", "#86d0c2", "#56b8a6", "#0f7b6c", "#0b5c50", "#063b33"),
    "eden": ("#8a5a0c", "#c8871e", "#e7b866"),
    "sign": ("#2f5fa8", "#7ea3db"),
    "ternary": ("#6b4fa0",),
    "qsgd": ("#b04a8b",),
    "topk": ("#ef9a94", "#a3242b", "#d9534f", "#f0b8a0", "#6d1a1f"),
    "mask": ("#c9b3a4", "#8c6d5a"),
    "lowrank": ("#5b6b3a",),
}
_SMOOTHED_SCORES = 4  # 20 rounds
_SHOWN_PERCENT = (70, 96)


def draw_codec_training(contests: Sequence[CodecContest], path: Path) -> None:
    figure = new_figure(14, 7.2, "MNIST 2NN, two digits a client: accuracy against uploaded bytes")
    colors = _contender_colors(contests)
    for axes, contest in zip(figure.subplots(1, len(contests), squeeze=False)[0], contests, strict=True):
        _training_panel(axes, contest, colors)
    write_figure(figure, path)


def _contender_colors(contests: Sequence[CodecContest]) -> Mapping[str, str]:
    """By title: a contender looks the same in every panel."""
    shades = {name: cycle(colors) for name, colors in _SHADES.items()}
    names = {contender.title: contender.codec.name for contest in contests for contender, _ in contest.runs}
    return {title: next(shades[name]) for title, name in names.items()}


def _training_panel(axes: Axes, contest: CodecContest, colors: Mapping[str, str]) -> None:
    setting = contest.setting
    for contender, trained in contest.runs:
        curve = [scored for scored in trained.curve if scored.number % setting.score_every == 0]
        color = colors[contender.title]
        label = f"{contender.title}: {contest.percent(trained):.1f} %, {trained.bits:.2f} bits"
        axes.plot([scored.client_bytes / 1e6 for scored in curve], _percents(curve), color=color, lw=1.8, label=label)
    axes.axhline(contest.percent(contest.runs[0][1]), color=FAINT, lw=1, ls=(0, (4, 4)), zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(*_SHOWN_PERCENT)
    mean_of = f"mean of {_SMOOTHED_SCORES * setting.score_every} rounds"
    dress_bench(axes, setting.name, "MB uploaded by a client, the mean of all", f"test accuracy, %, {mean_of}")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, columnspacing=1)


def _percents(curve: Sequence[Scored]) -> list[float]:
    """Smoothed accuracies, in per cent."""
    shares = [scored.accuracy for scored in curve]
    windows = [shares[max(0, end - _SMOOTHED_SCORES) : end] for end in range(1, len(shares) + 1)]
    return [100 * sum(window) / len(window) for window in windows]


# --- umbel bench secagg: times against their limits and the peer, and what is sent

_N, _M = 100, 1_000_000


def draw_secagg(path: Path, report: Report) -> None:
    figure = new_figure(13, 5.2, "Secure aggregation: what it costs")
    times, sent = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _times(times, [row for row in report.rows if row.unit in ("ms", "s")])
    _sent(sent, [row for row in report.rows if row.against.startswith("float32")])
    write_figure(figure, path)


def _times(axes: Axes, rows: Sequence[BenchRow]) -> None:
    for place, row in enumerate(rows):
        scale = 1e3 if row.unit == "s" else 1.0
        axes.barh(place - 0.2, row.ours * scale, 0.38, color=_OURS)
        axes.barh(place + 0.2, row.theirs * scale, 0.38, color=_PEER if "Flower" in row.against else _LIMIT)
    axes.set_yticks(range(len(rows)), [_short(row.what) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    for name, color in (("umbel", _OURS), ("its cryptography alone", _LIMIT), ("Flower's SecAgg+", _PEER)):
        axes.barh([0], [0], color=color, label=name)
    dress_bench(axes, "CPU time, one thread", "ms")


def _sent(axes: Axes, rows: Sequence[BenchRow]) -> None:
    axes.axhline(4 * _M / 1e6, color=FAINT, lw=1.2, ls="--", label="float32")
    widths = range(4, 24)
    sizes = [update_bytes(_N, _M, bits) / 1e6 for bits in widths]
    axes.plot(list(widths), sizes, color=_LIMIT, lw=2, label="the masked values")
    bits = [int(row.what.split(" bits")[0].split()[-1]) for row in rows]
    axes.plot(bits, [row.ours for row in rows], "o", color=_OURS, ms=6, label="all that a client sends")
    axes.set_ylim(bottom=0)
    dress_bench(axes, f"Sent by one of {_N} clients, {_M:,} values", "bits of a masked value", "MB")


def _short(what: str) -> str:
    head = what.split(":")[0]
    return head if len(head) <= 56 else f"{head[:55]}…"


# --- umbel bench simulate: what stacking gains by the size of the cohort, a panel for each workload

_ENGINE_LINES = dict(zip(ENGINES, ((_OURS, "stacked"), (_PEER, "one after another")), strict=True))


def draw_cohorts(workloads: Sequence[Sequence[CohortPoint]], device: str, path: Path) -> None:
    """`workloads`: the points of each."""
    figure = new_figure(4.4 * len(workloads), 4.4, f'Microseconds for each step of a client, on "{device}"')
    for axes, points in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        _cohorts_panel(axes, points)
    write_figure(figure, path)


def _cohorts_panel(axes: Axes, points: Sequence[CohortPoint]) -> None:
    for engine, (color, words) in _ENGINE_LINES.items():
        measured = [point for point in points if engine in point.seconds]
        sizes, costs = [point.n_clients for point in measured], [point.step_us(engine) for point in measured]
        axes.plot(sizes, costs, "o-", color=color, lw=2, ms=4, label=words)
        last = sizes[-1], costs[-1]
        label = _plain(costs[-1])
        axes.annotate(label, last, (0, 7), textcoords="offset points", ha="center", fontsize=8.5, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.1, y=0.15)
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_locator(NullLocator())
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    workload = points[0].workload
    dress(axes, f"{workload.name}: {workload.model_words}", "clients at once", grid=False)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- umbel bench window: for each fleet the share of useful client time, and the windows

_NIGHT = "#eef2f7"
_SMOOTHED_ROUNDS = 12  # six hours


def draw_windows(contests: Sequence[WindowContest], path: Path) -> None:
    figure = new_figure(13, 6.6, "A window that tunes itself, against the static 130 % rule")
    grid = figure.subplots(2, len(contests), sharex=True, squeeze=False)
    for i, contest in enumerate(contests):
        _use(grid[0][i], contest)
        _windows(grid[1][i], contest)
    grid[0][0].set_ylabel("client time of use", color=FAINT)
    grid[1][0].set_ylabel("window (static: the longest allowed)", color=FAINT)
    write_figure(figure, path)


def _use(axes: Axes, contest: WindowContest) -> None:
    for runs, color, name in ((contest.static, _PEER, "static 130 %"), (contest.tuned, _OURS, "self-tuned")):
        hours, shares = _smoothed_use(runs[0])
        axes.plot(hours, shares, color=color, lw=2.2, label=f"{name}: {goodput(runs):.1%}")
    best = goodput(contest.best)
    axes.axhline(best, color=_SLATE, lw=1.2, ls=(0, (5, 3)), label=f"best static, in hindsight: {best:.1%}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0.4, 1.02)
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, handlelength=1.6)
    _dress_hours(axes, contest, contest.fleet.name)


def _windows(axes: Axes, contest: WindowContest) -> None:
    attempts = contest.tuned[0].attempts
    hours = [attempt.round * EVERY_S / 3600 for attempt in attempts]
    axes.step(hours, [attempt.window_s for attempt in attempts], where="post", color=_OURS, lw=1.4)
    axes.axhline(contest.window_s, color=_PEER, lw=1.8)
    axes.axhline(contest.hindsight.window_s, color=_SLATE, lw=1.2, ls=(0, (5, 3)))
    asked = np.mean([attempt.over_selection for attempt in attempts[len(attempts) // 4 :]])
    words = f"asks {asked:.0%} of the target (hindsight: {contest.hindsight.over_selection:.0%})"
    axes.text(0.02, 0.04, words, transform=axes.transAxes, fontsize=8.5, color=INK)
    axes.set_ylim(0, contest.window_s * 1.08)
    axes.yaxis.set_major_formatter("{x:.0f} s")
    axes.set_xlabel("virtual hours; nights are shaded", color=FAINT, fontsize=9)
    _dress_hours(axes, contest, "")


def _smoothed_use(run: WindowRun) -> tuple[list[float], list[float]]:
    """Hours, and the share of useful time over the last few attempts at each."""
    attempts = run.attempts
    hours = [attempt.round * EVERY_S / 3600 for attempt in attempts]
    wasted, total = (np.cumsum([0.0, *(getattr(a, name) for a in attempts)]) for name in ("wasted_s", "busy_s"))
    first = np.maximum(np.arange(1, len(attempts) + 1) - _SMOOTHED_ROUNDS, 0)
    return hours, list(1 - (wasted[1:] - wasted[first]) / (total[1:] - total[first]))


def _dress_hours(axes: Axes, contest: WindowContest, title: str) -> None:
    last = contest.tuned[0].attempts[-1].round * EVERY_S / 3600
    for midnight in range(0, int(last) + 24, 24):
        axes.axvspan(midnight - 3, midnight + 9, color=_NIGHT, lw=0, zorder=0)  # the middle of the night is 3 o'clock
    axes.set_xlim(0, last)
    axes.set_xticks(range(0, int(last) + 1, 24))
    dress(axes, title, axes.get_xlabel())
