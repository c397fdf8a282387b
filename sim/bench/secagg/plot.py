"""What `umbel bench secagg` measures, as a picture: times against their limits and the peer, and what is sent."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from umbel.sim.bench.report import BenchRow, Report
from umbel.sim.bench.secagg.bytes import update_bytes
from umbel.sim.results.plot_style import FAINT, dress_bench, new_figure, write_figure

_OURS, _LIMIT, _PEER = "#0f7b6c", "#a9b4bd", "#c8871e"
_N, _M = 100, 1_000_000
_BITS = range(4, 24)


def draw(path: Path, report: Report) -> None:
    """Write the picture of these rows. Raises `OSError` if that cannot be done."""
    figure = new_figure(13, 5.2, "Secure aggregation: what it costs")
    times, sent = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _times(times, [row for row in report.rows if row.unit in ("ms", "s")])
    _sent(sent, [row for row in report.rows if row.against.startswith("float32")])
    write_figure(figure, path)


def _times(axes: Axes, rows: Sequence[BenchRow]) -> None:
    for place, row in enumerate(rows):
        scale = 1e3 if row.unit == "s" else 1.0
        is_peer = "Flower" in row.against
        axes.barh(place - 0.2, row.ours * scale, 0.38, color=_OURS)
        axes.barh(place + 0.2, row.theirs * scale, 0.38, color=_PEER if is_peer else _LIMIT)
    axes.set_yticks(range(len(rows)), [_short(row.what) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    for name, color in (("umbel", _OURS), ("its cryptography alone", _LIMIT), ("Flower's SecAgg+", _PEER)):
        axes.barh([0], [0], color=color, label=name)
    dress_bench(axes, "CPU time, one thread", "ms")


def _sent(axes: Axes, rows: Sequence[BenchRow]) -> None:
    axes.axhline(4 * _M / 1e6, color=FAINT, lw=1.2, ls="--", label="float32")
    sizes = [update_bytes(_N, _M, bits) / 1e6 for bits in _BITS]
    axes.plot(list(_BITS), sizes, color=_LIMIT, lw=2, label="the masked values")
    bits = [int(row.what.split(" bits")[0].split()[-1]) for row in rows]
    axes.plot(bits, [row.ours for row in rows], "o", color=_OURS, ms=6, label="all that a client sends")
    axes.set_ylim(bottom=0)
    dress_bench(axes, f"Sent by one of {_N} clients, {_M:,} values", "bits of a masked value", "MB")


def _short(what: str) -> str:
    head = what.split(":")[0]
    return head if len(head) <= 56 else f"{head[:55]}…"
