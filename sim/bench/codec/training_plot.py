"""Accuracy against uploaded bytes, as a picture: a panel for each federation, a line for each codec."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from umbel.sim.bench.codec.training import CodecContest, Scored

_INK, _FAINT, _GRID = "#22303c", "#7b8794", "#e6eaee"
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
    figure = Figure(figsize=(14, 7.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    colors = _colors(contests)
    for axes, contest in zip(figure.subplots(1, len(contests), squeeze=False)[0], contests, strict=True):
        _panel(axes, contest, colors)
    figure.suptitle("MNIST 2NN, two digits a client: accuracy against uploaded bytes", x=0.012, ha="left", color=_INK)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


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
    axes.axhline(contest.percent(contest.runs[0][1]), color=_FAINT, lw=1, ls=(0, (4, 4)), zorder=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(*_SHOWN_PERCENT)
    axes.set_title(contest.setting.name, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("MB uploaded by a client, in the mean of all", color=_FAINT, fontsize=9)
    axes.set_ylabel(
        f"test accuracy, %, mean of {_SMOOTHED * contest.setting.score_every} rounds", color=_FAINT, fontsize=9
    )
    axes.grid(color=_GRID, lw=0.8)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, columnspacing=1)
    axes.spines[["top", "right"]].set_visible(False)


def _smoothed(curve: Sequence[Scored]) -> list[float]:
    """In per cent."""
    shares = [scored.accuracy for scored in curve]
    windows = [shares[max(0, end - _SMOOTHED) : end] for end in range(1, len(shares) + 1)]
    return [100 * sum(window) / len(window) for window in windows]
