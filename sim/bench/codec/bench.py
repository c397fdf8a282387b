"""`umbel bench codec`: what the integer codec loses, costs and takes, beside theory, EDEN and a copy of memory.

Gaussian values are what any update looks like once it is rotated, so their theory is the limit of every codec that
rotates; real updates are not Gaussian, and codecs that do not rotate go below it.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from umbel.aggregation.codec.vectors.eden import Eden
from umbel.sim.bench.codec.cuda import cuda_rows
from umbel.sim.bench.codec.errors import (
    CodecPoint,
    entropy_coded,
    fixed_width_error,
    gaussian,
    mean_at,
    mean_by,
    mean_by_integers,
    real_layout,
    real_updates,
    vector_codec,
)
from umbel.sim.bench.codec.kernels import kernel_note, kernel_rows
from umbel.sim.bench.codec.server import SERVER_NOTES, server_rows
from umbel.sim.bench.codec.training import measure_training
from umbel.sim.bench.report import BenchRow, Hold, Report

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
    """Run it all; with `plot`, draw it there. `data`, `curves`: see `measure_training`, which raises the same errors.

    Raises `OSError` if the picture cannot be written.
    """
    trained, how_trained = measure_training(data, curves, quick=quick)
    rows = [*gaussian_rows(gaussian(N_GAUSSIAN)), *_mean_rows(), *kernel_rows(quick=quick), *cuda_rows()]
    rows += server_rows(1 << 22 if quick else 1 << 24)
    if plot is not None:
        from umbel.sim.bench.codec.plot import draw

        draw(plot)
    notes = (
        "Errors of Gaussian values: vNMSE, against the theory of the same quantizer; EDEN is ours, by its formulas.",
        "Entropy: of the integers, for a coder that knows the dither; theory is then that of a scalar quantizer with a "
        "dither, 3 % above the best unbiased one with an entropy coder at one bit, and the same from two bits on.",
        "Real updates: 20 clients with two digits each, an MLP of 301,066 weights; NMSE of their mean, bytes as sent.",
        *SERVER_NOTES,
        kernel_note(),
        how_trained,
    )
    return Report("codec", (*rows, *trained), notes)


def shannon(bits: int) -> float:
    """No code of Gaussian values in so many bits has a smaller vNMSE."""
    return 0.25**bits


def gaussian_rows(values: Tensor) -> list[BenchRow]:
    """Of Gaussian values: ours and EDEN, each beside its theory, and ours beside Shannon's bound."""
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
