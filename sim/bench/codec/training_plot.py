"""Accuracy against uploaded bytes, as a picture: a panel for each federation, a line for each codec."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes

from umbel.sim.bench.codec.training import CodecContest, Scored
from umbel.sim.results.plot_style import FAINT, dress_bench, new_figure, write_figure

# By the codec's name, one for each contender of it.
_COLORS: Mapping[str, Sequence[str]] = {
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
_SMOOTHED = 4  # scores, 20 rounds
_SHOWN_PERCENT = (70, 96)


def draw(contests: Sequence[CodecContest], path: Path) -> None:
    """Write the picture. Raises `OSError` if that cannot be done."""
    figure = new_figure(14, 7.2, "MNIST 2NN, two digits a client: accuracy against uploaded bytes")
    colors = _colors(contests)
    for axes, contest in zip(figure.subplots(1, len(contests), squeeze=False)[0], contests, strict=True):
        _panel(axes, contest, colors)
    write_figure(figure, path)


def _colors(contests: Sequence[CodecContest]) -> Mapping[str, str]:
    """By title: a contender looks the same in every panel."""
    shades = {name: cycle(colors) for name, colors in _COLORS.items()}
    names = {contender.title: contender.codec.name for contest in contests for contender, _ in contest.runs}
    return {title: next(shades[name]) for title, name in names.items()}


def _panel(axes: Axes, contest: CodecContest, colors: Mapping[str, str]) -> None:
    for contender, trained in contest.runs:
        curve = [scored for scored in trained.curve if scored.number % contest.setting.score_every == 0]
        color = colors[contender.title]
        label = f"{contender.title}: {contest.percent(trained):.1f} %, {trained.bits:.2f} bits"
        axes.plot([scored.client_bytes / 1e6 for scored in curve], _smoothed(curve), color=color, lw=1.8, label=label)
    axes.axhline(contest.percent(contest.runs[0][1]), color=FAINT, lw=1, ls=(0, (4, 4)), zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(*_SHOWN_PERCENT)
    smoothed_over = _SMOOTHED * contest.setting.score_every
    dress_bench(
        axes,
        contest.setting.name,
        "MB uploaded by a client, the mean of all",
        f"test accuracy, %, mean of {smoothed_over} rounds",
    )
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, columnspacing=1)


def _smoothed(curve: Sequence[Scored]) -> list[float]:
    """In per cent."""
    shares = [scored.accuracy for scored in curve]
    windows = [shares[max(0, end - _SMOOTHED) : end] for end in range(1, len(shares) + 1)]
    return [100 * sum(window) / len(window) for window in windows]
