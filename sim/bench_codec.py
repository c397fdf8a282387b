"""`umbel bench codec`: what the integer codec loses, costs and takes, beside theory, EDEN and a copy of memory.

Gaussian values are what any update looks like once it is rotated, so their theory is the limit of every codec that
rotates; real updates are not Gaussian, and codecs that do not rotate go below it.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from umbel.aggregation.codec.eden import Eden
from umbel.aggregation.codec.kernels import fold_packed, unrotate_into
from umbel.aggregation.codec.packing import packed_bytes
from umbel.aggregation.codec.rotation import Blocks
from umbel.sim.bench import Hold, Report, Row
from umbel.sim.bench_codec_cuda import cuda_rows
from umbel.sim.bench_codec_kernels import kernel_note, kernel_rows
from umbel.sim.codec_errors import (
    Point,
    entropy_coded,
    fixed_width_error,
    gaussian,
    mean_at,
    mean_by,
    mean_by_integers,
    real_updates,
    vector_codec,
)

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
N_FOLDED, FOLD_S_MAX = 100, 1.0
N_GAUSSIAN = 1 << 22  # with fewer, a handful of tail values is a per cent of the error at 8 bits


def measure(*, quick: bool, plot: Path | None) -> Report:
    """Run it all; with `plot`, draw it there. Raises `OSError` if that cannot be written."""
    rows = [*_gaussian_rows(), *_mean_rows(), *kernel_rows(quick=quick), *cuda_rows()]
    rows.append(_server_row(1 << 22 if quick else 1 << 24))
    if plot is not None:
        from umbel.sim.codec_plot import draw

        draw(plot)
    notes = (
        "Errors of Gaussian values: vNMSE, against the theory of the same quantizer; EDEN is ours, by its formulas.",
        "Entropy: of the integers, for a coder that knows the dither; what is sent is coded without that knowledge.",
        "Real updates: 20 clients with two digits each, an MLP of 301,066 weights; NMSE of their mean, bytes as sent.",
        f"The coordinator's: {N_FOLDED} updates of 4 bits added up, then one rotation back; CPU time, one thread.",
        kernel_note(),
    )
    return Report("codec", tuple(rows), notes)


def _gaussian_rows() -> list[Row]:
    values, rows = gaussian(N_GAUSSIAN), list[Row]()
    for bits, theory in FIXED_WIDTH.items():
        ours = fixed_width_error(values, bits)
        rows.append(Row(f"{bits} bits, fixed: error", ours, "theory", theory, "vNMSE", Hold(1.03)))
    for bits, theory in AT_ENTROPY.items():
        point, coded_by = entropy_coded(values, bits)
        rows.append(Row(f"{bits} bits of entropy: error", point.error, "theory", theory, "vNMSE", Hold(1.03)))
        rows.append(
            Row(f"{bits} bits of entropy: sent", point.bits, "entropy without the dither", coded_by, "bits", Hold(1.07))
        )
    for bits, theory in EDEN.items():
        ours = vector_codec(Eden(bits), values, "EDEN").error
        rows.append(Row(f"EDEN, {bits} bits: error", ours, "published", theory, "vNMSE", Hold(1.01)))
    return rows


def _mean_rows() -> list[Row]:
    updates, rows = real_updates(), list[Row]()
    for bits, (error_max, eden_bits) in PROMISED.items():
        ours, eden = mean_at(updates, bits), mean_by(Eden(eden_bits), updates, "EDEN")
        what, against = f"real updates in {ours.bits:.2f} bits: error", f"EDEN in {eden.bits:.2f}"
        rows.append(Row(what, ours.error, against, eden.error, "NMSE", Hold(error_max, "ours")))
    return rows


def mean_points() -> list[Point]:
    """The integer codec on real updates, at several steps."""
    return [mean_by_integers(real_updates(), step) for step in STEPS]


def _server_row(n_values: int) -> Row:
    """All that a coordinator does for a round of rotated 4-bit updates, scaled to 2^24 values."""
    blocks, threads = Blocks.of(n_values), torch.get_num_threads()
    torch.set_num_threads(1)
    packed = torch.randint(0, 256, (packed_bytes(blocks.n_padded, 4),), dtype=torch.uint8)
    sums, out = torch.zeros(blocks.n_padded, dtype=torch.int32), torch.zeros(n_values)
    model = torch.zeros(n_values)
    started = time.process_time()
    for _ in range(N_FOLDED):
        fold_packed(sums, packed, 4, 1)
    unrotate_into(out, sums.to(torch.float32), blocks, 1)
    folded = time.process_time()
    for _ in range(N_FOLDED):
        model.copy_(out)
    copied = time.process_time()
    torch.set_num_threads(threads)
    scale = (1 << 24) / n_values
    what, against = f"coordinator, {N_FOLDED} updates of 2^24 values", f"{N_FOLDED} copies"
    return Row(what, (folded - started) * scale, against, (copied - folded) * scale, "s", Hold(FOLD_S_MAX, "ours"))
