"""What `umbel bench codec` measures, as a picture: error against bits, of Gaussian values and of real updates' mean."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from umbel.aggregation.codec.vectors.buckets import Qsgd, Sign, Ternary
from umbel.aggregation.codec.vectors.codec import Sketching, VectorCodec
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.sparse import RandomMask, TopK
from umbel.sim.bench.codec.bench import AT_ENTROPY, mean_points, shannon
from umbel.sim.bench.codec.errors import (
    CodecPoint,
    entropy_coded,
    fixed_width_error,
    gaussian,
    mean_by,
    real_updates,
    vector_codec,
)
from umbel.sim.results.plot_style import FAINT, dress_bench, new_figure, write_figure

_OURS, _FIXED, _EDEN, _OTHER = "#0f7b6c", "#5aa897", "#c8871e", "#44546a"
_BITS = range(1, 9)


def draw(path: Path) -> None:
    """Write the picture. Raises `OSError` if that cannot be done."""
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
    _line(axes, eden, _EDEN, "EDEN")
    _line(axes, fixed, _FIXED, "integers, fixed width")
    _line(axes, coded, _OURS, "integers, entropy coded, as sent")
    axes.set_yscale("log")
    dress_bench(axes, "Gaussian values: any update, once rotated", "bits a coordinate", "vNMSE")


def _real(axes: Axes) -> None:
    updates = real_updates()
    _line(axes, [mean_by(Eden(bits), updates, "") for bits in (1, 2, 3, 4, 5)], _EDEN, "EDEN")
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
        axes.plot(point.bits, point.error, "o", color=_OTHER, ms=5)
        axes.annotate(name, (point.bits, point.error), (5, 4), textcoords="offset points", fontsize=8.5, color=_OTHER)
    axes.set_xlim(0, 7.5)
    axes.set_yscale("log")
    dress_bench(
        axes, "The mean of 20 real updates, two digits each", "bits a coordinate on the wire", "NMSE of the mean"
    )


def _line(axes: Axes, points: Sequence[CodecPoint], color: str, name: str) -> None:
    axes.plot([p.bits for p in points], [p.error for p in points], "o-", color=color, lw=2, ms=4, label=name)
