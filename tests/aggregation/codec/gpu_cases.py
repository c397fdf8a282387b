"""What the tests of updates that are encoded on a GPU share: plans of all codecs, and what each copies to the CPU."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tests.aggregation.codec.cases import heavy
from tests.suite.stand_in_gpu import Transfer
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.model.layout import PIECE_VALUES, Layout, TensorSpec
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, as_float32

KEY, RANK = 0x5EED, 3
GRID = Grid.finest(max_abs=64.0, total_weight_max=1000)
PLANS: Mapping[str, CodecPlan] = {
    "float32": CodecPlan(),
    "integer": CodecPlan(Codec.INTEGER, as_float32(250.0), KEY),
    "eden": CodecPlan(Codec.EDEN, key=KEY, parameters={"bits": 3}),
    "sign": CodecPlan(Codec.SIGN, key=KEY),
    "ternary": CodecPlan(Codec.TERNARY, key=KEY),
    "ternary, clipped": CodecPlan(Codec.TERNARY, key=KEY, parameters={"clip_sigmas": 2.5}),
    "qsgd": CodecPlan(Codec.QSGD, key=KEY),
    "qsgd, two planes": CodecPlan(Codec.QSGD, key=KEY, parameters={"levels": 1000}),
    "topk": CodecPlan(Codec.TOPK, key=KEY),
    "topk, many": CodecPlan(Codec.TOPK, key=KEY, parameters={"share": 0.4, "precision": "float32"}),
    "mask": CodecPlan(Codec.MASK, key=KEY, parameters={"every": 3}),
    "mask, structured": CodecPlan(Codec.MASK, key=KEY, parameters={"mode": "structured", "precision": "bfloat16"}),
    "planes": CodecPlan(Codec.PLANES, key=KEY),
    "planes, bfloat16": CodecPlan(Codec.PLANES, key=KEY, parameters={"precision": "bfloat16"}),
}
LOWRANK = CodecPlan(Codec.LOWRANK, key=KEY, parameters={"rank": 4})  # which promises no bits
N_EXACT = 130
_COLUMNS, _N_BIAS = 1600, 1003


def layout_of_rows(n_rows: int) -> Layout:
    """Exact values, a matrix of so many rows, and a vector."""
    exact, matrix = TensorSpec("a.running_mean", (N_EXACT,), "float32", 0), (n_rows, _COLUMNS)
    bias = TensorSpec("c.bias", (_N_BIAS,), "float32", N_EXACT + n_rows * _COLUMNS)
    return Layout((exact, TensorSpec("b.weight", matrix, "float32", N_EXACT), bias))


MEDIUM = layout_of_rows(170)  # more values than a chunk of the codecs of vectors, and than two pieces
LARGE = layout_of_rows(700)  # more than a segment of the integer codec


def layout_for(name: str) -> Layout:
    """Long enough that the codec's parts are several."""
    return LARGE if name == "integer" else MEDIUM


def change_of(layout: Layout, seed: int = 0) -> Tensor:
    """A change with rows of very different sizes, and one of zeros."""
    values, matrix = heavy(layout.n_values, seed) * 0.01, layout.tensors[1]
    rows = values[matrix.place].view(matrix.shape)
    rows *= torch.linspace(0.0, 1.0, matrix.shape[0]).unsqueeze(1)
    return values


def pieces(values: Tensor, device: torch.device) -> list[Tensor]:
    return [piece.clone().to(device) for piece in torch.split(values, PIECE_VALUES)]


def encoded(plan: CodecPlan, layout: Layout, change: Iterable[Tensor]) -> bytes:
    given = list(change)
    return b"".join(map(bytes, codec_for(plan, GRID, layout).encode(lambda: iter(given), RANK)))


FEW = 64  # numbers that are read one by one or in a handful: norms, bounds, counts


def crossed(transfers: Iterable[Transfer]) -> dict[torch.dtype, int]:
    """By dtype, how many values crossed, without `n_numbers`."""
    found = Counter[torch.dtype]()
    for one in transfers:
        if not _is_number(one):
            found[one.dtype] += one.n_values
    return dict(found)


def n_numbers(transfers: Iterable[Transfer]) -> int:
    """How many norms, bounds and counts crossed."""
    return sum(one.n_values for one in transfers if _is_number(one))


def _is_number(one: Transfer) -> bool:
    return one.n_values <= FEW and one.dtype != torch.uint8
