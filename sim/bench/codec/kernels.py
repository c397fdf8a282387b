"""The integer codec's kernels against a memory copy of the same vector, in the same run: one thread, CPU time.

Each figure is the least of many repetitions of this process's CPU time, and the copy's is taken between them, so that a
neighbour on the machine slows both or neither.
"""

import time
from collections.abc import Callable, Sequence

import torch

from umbel.aggregation.codec.kernels.arguments import Blocks, Levels, Quantizer
from umbel.aggregation.codec.kernels.kernels import (
    fold_packed,
    pack_into,
    quantize_into,
    rotate_and_pack_into,
    rotate_into,
    unrotate_into,
)
from umbel.aggregation.codec.kernels.native import Path, chosen
from umbel.aggregation.codec.kernels.packing import packed_bytes
from umbel.sim.bench.report import BenchRow, Hold

N_VALUES = 1 << 24
N_VALUES_QUICK = 1 << 22
ROTATE_MAX, ENCODE_MAX, FOLD_MAX = 1.5, 3.0, 1.2  # copies
_BITS = 4
_KEY, _DITHER_KEY = 0x5EED, 0xD1CE


def kernel_rows(*, quick: bool = False, repetitions: int = 15) -> Sequence[BenchRow]:
    """What the codec does to a vector, each against copying it."""
    n_values = N_VALUES_QUICK if quick else N_VALUES
    blocks, quantizer = Blocks.of(n_values), Quantizer(2.0, _DITHER_KEY, 7, Levels.of_width(_BITS))
    values = torch.randn(n_values, generator=torch.Generator().manual_seed(0))
    rotated, copied = torch.zeros(blocks.n_padded), torch.zeros(n_values)
    packed = torch.zeros(packed_bytes(blocks.n_padded, _BITS), dtype=torch.uint8)
    of_values = packed[: packed_bytes(n_values, _BITS)]
    sums = torch.zeros(blocks.n_padded, dtype=torch.int32)
    levels = torch.zeros(n_values, dtype=torch.int16)
    kernels: tuple[tuple[str, Hold | None, Callable[[], object]], ...] = (
        ("rotate, with signs", Hold(ROTATE_MAX), lambda: rotate_into(rotated, values, blocks, _KEY)),
        ("rotate back", None, lambda: unrotate_into(copied, rotated, blocks, _KEY)),
        ("quantize to int16", None, lambda: quantize_into(levels, values, quantizer)),
        ("quantize, pack 4 bits", None, lambda: pack_into(of_values, values, quantizer, _BITS)),
        (
            "rotate, quantize, pack 4 bits",
            Hold(ENCODE_MAX),
            lambda: rotate_and_pack_into(packed, values, blocks, _KEY, quantizer, _BITS),
        ),
        ("unpack 4 bits, add to int32", Hold(FOLD_MAX), lambda: fold_packed(sums, packed, _BITS, 3)),
    )
    against = f"memory copy of 2^{n_values.bit_length() - 1} floats"
    rows: list[BenchRow] = []
    for what, hold, kernel in kernels:
        ours, copy = _least_ms((kernel, lambda: copied.copy_(values)), repetitions)
        rows.append(BenchRow(what, ours, against, copy, "ms", hold))
    return rows


def kernel_note() -> str:
    """Which kernels were measured."""
    kernels = chosen()
    path = Path.TORCH if kernels is None else kernels.path
    return f"Kernels: {path}; one thread, the least CPU time of repeated runs, copies taken between them."


def _least_ms(kernels: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """By kernel: its least CPU time. They take turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    least = [float("inf")] * len(kernels)
    for _ in range(repetitions):
        for i, kernel in enumerate(kernels):
            started = time.process_time()
            kernel()
            least[i] = min(least[i], (time.process_time() - started) * 1e3)
    torch.set_num_threads(threads)
    return least
