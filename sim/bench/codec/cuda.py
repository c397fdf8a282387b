"""The integer codec's kernels on a GPU against a copy from device to device, in the same run; nothing without a GPU.

Times are the device's own, between two events in its queue: the least of many repetitions.
"""

from collections.abc import Callable, Sequence

import torch

from umbel.aggregation.codec.kernels.arguments import Blocks, Levels, Quantizer
from umbel.aggregation.codec.kernels.kernels import fold_packed, rotate_and_pack_into, rotate_into, unrotate_into
from umbel.aggregation.codec.kernels.packing import packed_bytes
from umbel.sim.bench.report import BenchRow, Hold

N_VALUES = 1 << 26  # a quarter of a gigabyte: beyond any GPU's caches
COPIES_MAX = 1.5
_BITS, _KEY = 4, 0x5EED
_WARM_UPS, _REPETITIONS = 3, 20


def cuda_rows() -> Sequence[BenchRow]:
    """What the codec does to a vector on the GPU, if there is one."""
    if not torch.cuda.is_available():
        return ()
    blocks, quantizer = Blocks.of(N_VALUES), Quantizer(2.0, _KEY, 7, Levels.of_width(_BITS))
    values = torch.randn(N_VALUES, device="cuda")
    rotated, copied = values.new_zeros(blocks.n_padded), values.new_zeros(N_VALUES)
    packed = torch.zeros(packed_bytes(blocks.n_padded, _BITS), dtype=torch.uint8, device="cuda")
    sums = torch.zeros(blocks.n_padded, dtype=torch.int32, device="cuda")
    kernels: tuple[tuple[str, Hold | None, Callable[[], object]], ...] = (
        ("rotate, with signs", Hold(COPIES_MAX), lambda: rotate_into(rotated, values, blocks, _KEY)),
        ("rotate back", None, lambda: unrotate_into(copied, rotated, blocks, _KEY)),
        (
            "rotate, quantize, pack 4 bits",
            Hold(COPIES_MAX),
            lambda: rotate_and_pack_into(packed, values, blocks, _KEY, quantizer, _BITS),
        ),
        ("unpack 4 bits, add to int32", None, lambda: fold_packed(sums, packed, _BITS, 3)),
    )
    rows: list[BenchRow] = []
    for what, hold, kernel in kernels:
        ours, copy = _least_ms(kernel), _least_ms(lambda: copied.copy_(values))
        rows.append(BenchRow(f"CUDA: {what}", ours, f"device copy of {N_VALUES} floats", copy, "ms", hold))
    return rows


def _least_ms(kernel: Callable[[], object]) -> float:
    for _ in range(_WARM_UPS):
        kernel()
    least = float("inf")
    for _ in range(_REPETITIONS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        kernel()
        ended.record()
        ended.synchronize()
        least = min(least, began.elapsed_time(ended))
    return least
