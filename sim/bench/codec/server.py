"""What a round's updates cost the coordinator: CPU time, one thread, scaled to 100 updates of 2^24 values."""

import struct
import time
from collections.abc import Sequence

import torch
import zstandard
from torch import Tensor

from umbel.aggregation.codec.integer import IntegerCodec
from umbel.aggregation.codec.kernels.arguments import Blocks
from umbel.aggregation.codec.kernels.kernels import fold_packed, unrotate_into
from umbel.aggregation.codec.kernels.packing import packed_bytes
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32
from umbel.aggregation.plans.grid import Grid
from umbel.sim.bench.report import BenchRow, Hold

N_UPDATES, N_VALUES, FOLD_S_MAX = 100, 1 << 24, 1.0
SERVER_NOTES = (
    f"The coordinator's: {N_UPDATES} updates of 4 bits added up, then one rotation back; CPU time, one thread.",
    "Entropy coded: each update is checked, then folded, as the coordinator does; against decompressing it once.",
)
_SENT, _STEP, _N_COLUMNS = 5, 0.16, 4096


def server_rows(n_values: int) -> Sequence[BenchRow]:
    """Measured with updates of so many values, a multiple of 4,096."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = (_fixed_width(n_values), _entropy_coded(n_values))
    torch.set_num_threads(threads)
    return rows


def _fixed_width(n_values: int) -> BenchRow:
    """All that a coordinator does for a round of rotated 4-bit updates."""
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
    """The same of updates of the integer codec, of a matrix whose rows and columns differ, at about 2 bits."""
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
