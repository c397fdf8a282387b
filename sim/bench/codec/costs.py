"""What the integer codec costs in time: its kernels against memory copies, on one thread and on a GPU, and a round's
updates at the coordinator.

A kernel's figure is the least of many repetitions, with the copy's taken between them, so that a busy machine slows
both or neither. On a GPU, times are the device's own, between two events in its queue.
"""

import struct
import time
from collections.abc import Callable, Sequence

import torch
import zstandard
from torch import Tensor

from umbel.aggregation.codec.integer import IntegerCodec
from umbel.aggregation.kernels.arguments import Blocks, Levels, Quantizer
from umbel.aggregation.kernels.kernels import (
    fold_packed,
    pack_into,
    quantize_into,
    rotate_and_pack_into,
    rotate_into,
    unrotate_into,
)
from umbel.aggregation.kernels.native import Path, chosen
from umbel.aggregation.kernels.packing import packed_bytes
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, as_float32
from umbel.sim.bench.measuring import least_ms
from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.engines.device import one_thread

N_VALUES, N_VALUES_QUICK = 1 << 24, 1 << 22
N_VALUES_CUDA = 1 << 26  # a quarter of a gigabyte: beyond any GPU's caches
ROTATE_MAX, ENCODE_MAX, FOLD_MAX = 1.5, 3.0, 1.2  # copies
CUDA_COPIES_MAX = 1.5
_BITS, _KEY = 4, 0x5EED
_QUANTIZER = Quantizer(2.0, 0xD1CE, 7, Levels.of_width(_BITS))
_CUDA_WARM_UPS, _CUDA_REPETITIONS = 3, 20

_Kernel = Callable[[], object]


def kernel_rows(*, quick: bool = False, repetitions: int = 15) -> Sequence[BenchRow]:
    """Each kernel against copying its vector."""
    n_values = N_VALUES_QUICK if quick else N_VALUES
    values = torch.randn(n_values, generator=torch.Generator().manual_seed(0))
    copied, levels = torch.zeros(n_values), torch.zeros(n_values, dtype=torch.int16)
    of_values = torch.zeros(packed_bytes(n_values, _BITS), dtype=torch.uint8)
    rotate, rotate_back, encode, fold = _rotated_kernels(values)
    kernels: tuple[tuple[str, Hold | None, _Kernel], ...] = (
        ("rotate, with signs", Hold(ROTATE_MAX), rotate),
        ("rotate back", None, rotate_back),
        ("quantize to int16", None, lambda: quantize_into(levels, values, _QUANTIZER)),
        ("quantize, pack 4 bits", None, lambda: pack_into(of_values, values, _QUANTIZER, _BITS)),
        ("rotate, quantize, pack 4 bits", Hold(ENCODE_MAX), encode),
        ("unpack 4 bits, add to int32", Hold(FOLD_MAX), fold),
    )
    against = f"memory copy of 2^{n_values.bit_length() - 1} floats"
    rows: list[BenchRow] = []
    with one_thread():
        for what, promise, kernel in kernels:
            ours, copy = least_ms((kernel, lambda: copied.copy_(values)), repetitions)
            rows.append(BenchRow(what, ours, against, copy, "ms", promise))
    return rows


def _rotated_kernels(values: Tensor) -> tuple[_Kernel, _Kernel, _Kernel, _Kernel]:
    """On the device of `values`: rotate, rotate back, encode (rotate, quantize, pack), and fold what is packed."""
    blocks = Blocks.of(len(values))
    rotated, back = values.new_zeros(blocks.n_padded), torch.zeros_like(values)
    packed = values.new_zeros(packed_bytes(blocks.n_padded, _BITS), dtype=torch.uint8)
    sums = values.new_zeros(blocks.n_padded, dtype=torch.int32)
    return (
        lambda: rotate_into(rotated, values, blocks, _KEY),
        lambda: unrotate_into(back, rotated, blocks, _KEY),
        lambda: rotate_and_pack_into(packed, values, blocks, _KEY, _QUANTIZER, _BITS),
        lambda: fold_packed(sums, packed, _BITS, 3),
    )


def kernel_note() -> str:
    """Which kernels were measured."""
    kernels = chosen()
    path = Path.TORCH if kernels is None else kernels.path
    return f"Kernels: {path}; one thread. The least CPU time of repeated runs; copies are timed between the runs."


def cuda_rows() -> Sequence[BenchRow]:
    """Each kernel on the GPU against a copy from device to device; nothing without a GPU."""
    if not torch.cuda.is_available():
        return ()
    values = torch.randn(N_VALUES_CUDA, device="cuda")
    copied, against = torch.zeros_like(values), f"device copy of {N_VALUES_CUDA} floats"
    rotate, rotate_back, encode, fold = _rotated_kernels(values)
    kernels: tuple[tuple[str, Hold | None, _Kernel], ...] = (
        ("rotate, with signs", Hold(CUDA_COPIES_MAX), rotate),
        ("rotate back", None, rotate_back),
        ("rotate, quantize, pack 4 bits", Hold(CUDA_COPIES_MAX), encode),
        ("unpack 4 bits, add to int32", None, fold),
    )
    rows: list[BenchRow] = []
    for what, promise, kernel in kernels:
        ours, copy = _least_cuda_ms(kernel), _least_cuda_ms(lambda: copied.copy_(values))
        rows.append(BenchRow(f"CUDA: {what}", ours, against, copy, "ms", promise))
    return rows


def _least_cuda_ms(kernel: _Kernel) -> float:
    for _ in range(_CUDA_WARM_UPS):
        kernel()
    least = float("inf")
    for _ in range(_CUDA_REPETITIONS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        kernel()
        ended.record()
        ended.synchronize()
        least = min(least, began.elapsed_time(ended))
    return least


# --- a round's updates at the coordinator: CPU time, scaled to 100 updates of 2^24 values ---

N_UPDATES, FOLD_S_MAX = 100, 1.0
SERVER_NOTES = (
    f"Coordinator: {N_UPDATES} updates of 4 bits are added up, and the sum is rotated back once; CPU time, one thread.",
    "Entropy coded: each update is checked and added up, as the coordinator does it. In the rows against "
    "Zstandard alone, the other side only decompresses.",
)
_SENT, _STEP, _N_COLUMNS = 5, 0.16, 4096


def server_rows(n_values: int) -> Sequence[BenchRow]:
    """What the coordinator does for a round's updates. `n_values`: of each measured update, a multiple of 4,096."""
    with one_thread():
        return _fixed_width(n_values), _entropy_coded(n_values)


def _fixed_width(n_values: int) -> BenchRow:
    """A round of rotated 4-bit updates."""
    blocks = Blocks.of(n_values)
    packed = torch.randint(0, 256, (packed_bytes(blocks.n_padded, 4),), dtype=torch.uint8)
    sums, out = torch.zeros(blocks.n_padded, dtype=torch.int32), torch.zeros(n_values)
    model = torch.zeros(n_values)
    started = time.process_time()
    for _ in range(N_UPDATES):
        fold_packed(sums, packed, 4, 1)
    unrotate_into(out, sums.to(torch.float32), blocks, 1)
    folded = time.process_time()
    for _ in range(N_UPDATES):
        model.copy_(out)
    copied = time.process_time()
    scale = N_VALUES / n_values
    what, against = f"coordinator, {N_UPDATES} updates of 2^24 values", f"{N_UPDATES} copies"
    return BenchRow(what, (folded - started) * scale, against, (copied - folded) * scale, "s", Hold(FOLD_S_MAX, "ours"))


def _entropy_coded(n_values: int) -> BenchRow:
    """A round of updates of the integer codec, of a matrix whose rows and columns differ, at about 2 bits."""
    values = _layered(n_values)
    layout = Layout.of_state({"x": values})
    plan = CodecPlan(Codec.INTEGER, as_float32(1 / (_STEP * float(values.square().mean().sqrt()))), 7)
    codec = IntegerCodec(plan, Grid.finest(max_abs=1e6, total_weight_max=N_UPDATES), layout)
    updates = [b"".join(codec.encode(lambda: iter([values.flatten()]), rank)) for rank in range(_SENT)]
    total, started = codec.new_sum(), time.process_time()
    for rank, update in enumerate(updates):
        head, body = update[: codec.header_bytes], update[codec.header_bytes :]
        codec.largest_change(head, [body], rank)
        total.add(codec.integers(head, [body], rank), 1)
    folded = time.process_time()
    for update in updates:
        _decompress(update[codec.header_bytes :])
    decompressed = time.process_time()
    scale = N_VALUES / n_values * N_UPDATES / _SENT
    bits = 8 * sum(map(len, updates)) / _SENT / n_values
    what = f"coordinator, {N_UPDATES} updates, entropy coded in {bits:.1f} bits"
    return BenchRow(what, (folded - started) * scale, "Zstandard alone", (decompressed - folded) * scale, "s")


def _layered(n_values: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    rows, columns = n_values // _N_COLUMNS, _N_COLUMNS
    rows_and_columns = torch.randn(rows, 1, generator=draw).exp() * torch.randn(columns, generator=draw).exp()
    return torch.randn(rows, columns, generator=draw) * rows_and_columns


def _decompress(blocks: bytes) -> None:
    at = 0
    while at < len(blocks):
        (length,) = struct.unpack_from("<I", blocks, at)
        zstandard.ZstdDecompressor().decompress(blocks[at + 4 : at + 4 + length])
        at += 4 + length
