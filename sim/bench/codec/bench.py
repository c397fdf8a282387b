"""`umbel bench codec`: the errors, bytes and time of the integer codec, against theory, EDEN and a memory copy.

vNMSE of one vector: E||x - x^||^2 / ||x||^2. NMSE of a mean: ||mean - mean^||^2 / ||mean||^2, where the mean is that of
the updates before encoding. Bits are those of the bytes on the wire, headers and padding included, except where a text
says "of entropy".

Any update looks Gaussian once it is rotated, so theory for Gaussian values is the limit of every codec that rotates.
Real updates are not Gaussian; codecs that do not rotate go below that limit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import Tensor, nn

from umbel.aggregation.codec.entropy import entropy
from umbel.aggregation.codec.integer import IntegerCodec
from umbel.aggregation.codec.vectors.buckets import Qsgd, Sign, Ternary
from umbel.aggregation.codec.vectors.codec import CodecContext, Sketching, VectorCodec
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.sparse import RandomMask, TopK
from umbel.aggregation.kernels.arguments import Levels, Quantizer
from umbel.aggregation.kernels.kernels import dither_into, quantize_into
from umbel.aggregation.kernels.quantize import Dithers
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part, as_float32
from umbel.aggregation.update.wire import HEADER_BYTES
from umbel.sim.bench.codec.costs import SERVER_NOTES, cuda_rows, kernel_note, kernel_rows, server_rows
from umbel.sim.bench.codec.training import measure_training
from umbel.sim.bench.report import BenchRow, Hold, Report
from umbel.sim.results.plot_style import FAINT, OURS, PEER, SLATE, dress_bench, new_figure, write_figure

# By bits: the clipping of levels of a fixed width with the least error, in standard deviations (found by trial).
BEST_CUTS: Mapping[int, float] = {1: 1.55, 2: 2.05, 3: 2.35, 4: 2.7, 5: 3.0, 6: 3.32, 7: 3.66, 8: 3.95}
N_CLIENTS, CLASSES_EACH = 20, 2
_WIDTH, _BATCH, _STEPS, _RATE = 512, 16, 20, 0.05
_KEY = 0xD17
_WHOLE = Levels()
_STEP_FOUND = 1.001


@dataclass(frozen=True, slots=True)
class CodecPoint:
    """A codec's cost in bits a coordinate, and its error."""

    name: str
    bits: float
    error: float


def gaussian(n_values: int) -> Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(1))


def fixed_width_error(values: Tensor, bits: int) -> float:
    """vNMSE of the integer codec's levels cut to a fixed width, scaled to be unbiased; one client."""
    levels = Levels.of_width(bits)
    found = _decoded(values, (1 << bits) / (2 * BEST_CUTS[bits]), levels)[1]
    unbiased = found * (values.double().square().sum() / (values.double() @ found))
    return vnmse(values, unbiased)


def entropy_coded(values: Tensor, bits: float) -> CodecPoint:
    """The integer codec at the step at which its integers have this entropy given the dither, which both ends know:
    bits as sent, and vNMSE.
    """
    step = _step_where(lambda step: _entropy_given_dither(_decoded(values, 1 / step, _WHOLE)[0]) <= bits)
    found = _decoded(values, 1 / step, _WHOLE)[1]
    layout = Layout.of_state({"x": values})
    codec = IntegerCodec(
        CodecPlan(Codec.INTEGER, as_float32(1 / step), _KEY), Grid.finest(max_abs=64.0, total_weight_max=1), layout
    )
    wire = 8 * sum(map(len, codec.encode(lambda: iter([values]), 0))) / values.numel()
    return CodecPoint("integer", wire, vnmse(values, found))


def vector_codec(codec: VectorCodec, values: Tensor, name: str, n_keys: int = 1) -> CodecPoint:
    """The vNMSE and bits of another codec, averaged over some keys."""
    layout, errors, n_bytes = Layout.of_state({"x": values}), list[float](), 0
    for key in range(n_keys):
        payload = list(codec.encode(values, CodecContext(layout, key)))
        errors.append(vnmse(values, torch.cat(list(codec.decode(payload, CodecContext(layout, key))))))
        n_bytes += sum(map(len, payload))
    return CodecPoint(name, 8 * n_bytes / n_keys / values.numel(), sum(errors) / n_keys)


def vnmse(values: Tensor, found: Tensor) -> float:
    return float((values.double() - found.double()).square().sum() / values.double().square().sum())


def mean_by_integers(updates: Sequence[Tensor], step: float, layout: Layout | None = None) -> CodecPoint:
    """The whole codec, with a step in root mean squares of the updates: wire bits, and NMSE of the mean.

    Without a layout, updates are of one flat tensor, without rows and columns.
    """
    n_values = updates[0].numel()
    rms = float(torch.stack(list(updates)).double().square().mean().sqrt())
    layout = layout or Layout.of_state({"x": updates[0]})
    plan = CodecPlan(Codec.INTEGER, as_float32(1 / (step * rms)), _KEY)
    codec = IntegerCodec(plan, Grid.finest(max_abs=64.0, total_weight_max=len(updates)), layout)
    total, n_bytes = codec.new_sum(), 0
    for rank, update in enumerate(updates):
        written = b"".join(codec.encode(lambda change=update: iter([change]), rank))  # type: ignore[misc]  # bound now
        n_bytes += len(written)
        head, body = written[: codec.header_bytes], written[codec.header_bytes :]
        total.add(codec.integers(head, [body], rank), 1)
    found = codec.mean(total, [Part(1, rank) for rank in range(len(updates))]).mean_slice(0, n_values)
    return CodecPoint("integer", 8 * n_bytes / len(updates) / n_values, vnmse(_mean(updates), found))


def mean_at(updates: Sequence[Tensor], bits: float, layout: Layout | None = None) -> CodecPoint:
    """The whole codec at the finest step that stays within these bits on the wire."""
    step = _step_where(lambda step: mean_by_integers(updates, step, layout).bits <= bits)
    return mean_by_integers(updates, step, layout)


def mean_by(codec: VectorCodec, updates: Sequence[Tensor], name: str) -> CodecPoint:
    """The NMSE of the mean and the bits of another codec, each client with its own key."""
    layout, n_values = Layout.of_state({"x": updates[0]}), updates[0].numel()
    found, n_bytes = torch.zeros(n_values, dtype=torch.float64), 0
    for rank, update in enumerate(updates):
        context = CodecContext(layout, _KEY, rank)
        payload = list(codec.encode(update, context))
        n_bytes += HEADER_BYTES + sum(map(len, payload))
        found += torch.cat(list(codec.decode(payload, context))).double() / len(updates)
    return CodecPoint(name, 8 * n_bytes / len(updates) / n_values, vnmse(_mean(updates), found))


@cache
def real_updates() -> tuple[Tensor, ...]:
    """Weight changes of twenty clients with two digits each, in the order of `real_layout`: a round of an MLP of
    301,066 weights, after five such rounds without compression.
    """
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    model = _model()
    shards = [_shard(labels, i) for i in range(N_CLIENTS)]
    updates = tuple[Tensor, ...]()
    for _ in range(6):
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        updates = tuple(_trained(model, start, images[shard], labels[shard]) - start for shard in shards)
        nn.utils.vector_to_parameters(start + _mean(updates).float(), model.parameters())
    return tuple(_in_layout_order(model, update) for update in updates)


def real_layout() -> Layout:
    """Of the model of `real_updates`."""
    return Layout.of_state(_model().state_dict())


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10))


def _in_layout_order(model: nn.Module, update: Tensor) -> Tensor:
    nn.utils.vector_to_parameters(update, model.parameters())
    return torch.cat([values.flatten() for _, values in sorted(model.state_dict().items())])


def _shard(labels: Tensor, i: int) -> Tensor:
    """The samples of client i: every fourth of two classes."""
    first, second = i % 10, (i + 1 + i // 10) % 10
    places = ((labels == first) | (labels == second)).nonzero().squeeze(1)
    return places[i % 4 :: 4]


def _trained(model: nn.Module, start: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    optimizer, draw = torch.optim.SGD(model.parameters(), lr=_RATE), torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        batch = torch.randint(len(images), (_BATCH,), generator=draw)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _mean(updates: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(updates)).double().mean(0)


def _step_where(is_coarse_enough: Callable[[float], bool]) -> float:
    """The least step that is coarse enough, to a thousandth."""
    low, high = 2.0**-8, 2.0**4
    while high / low > _STEP_FOUND:
        step = math.sqrt(low * high)
        low, high = (low, step) if is_coarse_enough(step) else (step, high)
    return high


def _entropy_given_dither(levels: Tensor) -> float:
    """The mean entropy of integers with about equal dither."""
    shared = torch.empty(levels.numel(), dtype=torch.int32)
    dither_into(shared, _KEY, 0)
    kinds = shared >> 11
    return sum(entropy.entropy_bits(levels[kinds == kind]) for kind in range(32)) / 32


def _decoded(values: Tensor, inverse_step: float, levels: Levels) -> tuple[Tensor, Tensor]:
    """The integers of one client, and the vector decoded from them."""
    quantizer = Quantizer(as_float32(inverse_step), _KEY, 0, levels)
    made, shared = torch.empty(values.numel(), dtype=torch.int32), torch.empty(values.numel(), dtype=torch.int32)
    quantize_into(made, values, quantizer)
    dither_into(shared, _KEY, 0)
    found = Dithers([(1, 0)], levels).subtract(made.to(torch.int64), shared).div_(quantizer.inverse_step)
    return made, found


# vNMSE on N(0, 1) by bits, by numeric integration. Subtractive dither, cut at the best place and scaled to be unbiased;
# the same without a cut, at this entropy given the dither; EDEN: D / (1 - D), D of Lloyd and Max (Vargaftik et al.).
FIXED_WIDTH: Mapping[int, float] = {
    1: 7.98e-1, 2: 1.481e-1, 3: 4.006e-2, 4: 1.179e-2, 5: 3.518e-3, 6: 1.042e-3, 7: 3.045e-4, 8: 8.770e-5,
}  # fmt: skip
AT_ENTROPY: Mapping[int, float] = {
    1: 5.514e-1, 2: 9.764e-2, 3: 2.274e-2, 4: 5.591e-3, 5: 1.392e-3, 6: 3.476e-4, 7: 8.688e-5, 8: 2.172e-5,
}  # fmt: skip
EDEN: Mapping[int, float] = {
    1: 5.708e-1, 2: 1.331e-1, 3: 3.578e-2, 4: 9.592e-3, 5: 2.511e-3, 6: 6.447e-4, 7: 1.635e-4, 8: 4.119e-5,
}  # fmt: skip
STEPS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125)
PROMISED: Mapping[float, tuple[float, int]] = {2.0: (1.3e-2, 3), 2.5: (3.5e-3, 4)}  # by bits: NMSE; the bits EDEN needs
N_GAUSSIAN = 1 << 22  # with fewer, a handful of tail values is a per cent of the error at 8 bits


def measure(*, quick: bool, plot: Path | None, data: Path | None = None, curves: Path | None = None) -> Report:
    """Run the benchmark, and draw it to `plot`. `data`, `curves`: see `measure_training`, which raises the same errors.

    Raises `OSError` if the picture cannot be written.
    """
    trained, how_trained = measure_training(data, curves, quick=quick)
    rows = [*gaussian_rows(gaussian(N_GAUSSIAN)), *_mean_rows(), *kernel_rows(quick=quick), *cuda_rows()]
    rows += server_rows(1 << 22 if quick else 1 << 24)
    if plot is not None:
        draw_codec_errors(plot)
    notes = (
        "Gaussian values: the error is the vNMSE (squared error divided by the squared norm). Theory is the "
        "computed error of the same quantizer. EDEN is our own implementation of the formulas of Vargaftik et al. "
        "2022.",
        "Bits of entropy: the entropy of the integers, for a coder that knows the dither. Theory is the error of a "
        "scalar quantizer with a dither. At one bit, this error is 3 % above that of the best unbiased quantizer with "
        "an entropy coder. From two bits on, the two errors are the same.",
        "Real updates: 20 clients with two digits each, and an MLP of 301,066 weights. The error is the NMSE of the "
        "mean update; bytes are counted as sent.",
        *SERVER_NOTES,
        kernel_note(),
        how_trained,
    )
    return Report("codec", (*rows, *trained), notes)


def shannon(bits: int) -> float:
    """The least vNMSE of any code of Gaussian values with so many bits."""
    return 0.25**bits


def gaussian_rows(values: Tensor) -> list[BenchRow]:
    """Gaussian values: ours and EDEN against their theory, and ours against Shannon's bound."""
    rows = list[BenchRow]()
    for bits, theory in FIXED_WIDTH.items():
        ours = fixed_width_error(values, bits)
        rows.append(BenchRow(f"{bits} bits, fixed: error", ours, "theory", theory, "vNMSE", Hold(1.03)))
    for bits, theory in AT_ENTROPY.items():
        point = entropy_coded(values, bits)
        rows.append(BenchRow(f"{bits} bits of entropy: error", point.error, "theory", theory, "vNMSE", Hold(1.03)))
        rows.append(BenchRow(f"{bits} bits of entropy: error", point.error, "Shannon's bound", shannon(bits), "vNMSE"))
        rows.append(BenchRow(f"{bits} bits of entropy: sent", point.bits, "entropy", bits, "bits", Hold(1.07)))
    for bits, theory in EDEN.items():
        ours = vector_codec(Eden(bits), values, "EDEN").error
        rows.append(BenchRow(f"EDEN, {bits} bits: error", ours, "published", theory, "vNMSE", Hold(1.01)))
    return rows


def _mean_rows() -> list[BenchRow]:
    updates, rows = real_updates(), list[BenchRow]()
    for bits, (error_max, eden_bits) in PROMISED.items():
        ours, eden = mean_at(updates, bits, real_layout()), mean_by(Eden(eden_bits), updates, "EDEN")
        what, against = f"real updates in {ours.bits:.2f} bits: error", f"EDEN in {eden.bits:.2f}"
        rows.append(BenchRow(what, ours.error, against, eden.error, "NMSE", Hold(error_max, "ours")))
    return rows


def mean_points() -> list[CodecPoint]:
    """The integer codec on real updates, at several steps."""
    return [mean_by_integers(real_updates(), step, real_layout()) for step in STEPS]


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
    _line(axes, eden, PEER, "EDEN")
    _line(axes, fixed, "#5aa897", "integers, fixed width")
    _line(axes, coded, OURS, "integers, entropy coded, as sent")
    axes.set_yscale("log")
    dress_bench(axes, "Gaussian values: any update, once rotated", "bits a coordinate", "vNMSE")


def _real(axes: Axes) -> None:
    updates = real_updates()
    _line(axes, [mean_by(Eden(bits), updates, "") for bits in (1, 2, 3, 4, 5)], PEER, "EDEN")
    _line(axes, mean_points(), OURS, "integers, entropy coded")
    others: tuple[tuple[str, VectorCodec], ...] = (
        ("sign", Sign()),
        ("TernGrad", Ternary()),
        ("QSGD", Qsgd(levels=16)),
        ("top 5 %", TopK(share=0.05)),
        ("random mask, 1 in 10", RandomMask(every=10, mode=Sketching.SKETCHED)),
    )
    for name, codec in others:
        point = mean_by(codec, updates, name)
        axes.plot(point.bits, point.error, "o", color=SLATE, ms=5)
        axes.annotate(name, (point.bits, point.error), (5, 4), textcoords="offset points", fontsize=8.5, color=SLATE)
    axes.set_xlim(0, 7.5)
    axes.set_yscale("log")
    dress_bench(
        axes, "The mean of 20 real updates, two digits each", "bits a coordinate on the wire", "NMSE of the mean"
    )


def _line(axes: Axes, points: Sequence[CodecPoint], color: str, name: str) -> None:
    axes.plot([p.bits for p in points], [p.error for p in points], "o-", color=color, lw=2, ms=4, label=name)
