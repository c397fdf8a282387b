"""What the tests of codecs share: codecs with parameters, layouts of any size, weight changes, measured errors."""

from collections.abc import Iterable

import torch

from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.vectors.buckets import Qsgd, Sign, Ternary
from umbel.aggregation.codec.vectors.codec import CodecContext, Sketching, VectorCodec
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.lossless import Planes
from umbel.aggregation.codec.vectors.lowrank import LowRank
from umbel.aggregation.codec.vectors.sparse import RandomMask, TopK
from umbel.aggregation.model.layout import Layout, TensorSpec

ROWS = 12

CASES: dict[str, VectorCodec] = {
    "eden, 1 bit": Eden(1),
    "eden, 5 bits": Eden(5),
    "sign": Sign(),
    "ternary": Ternary(),
    "ternary, clipped": Ternary(clip_sigmas=2.5),
    "qsgd": Qsgd(),
    "qsgd, two planes": Qsgd(levels=1000),
    "topk": TopK(share=0.01),
    "topk, many": TopK(share=0.4, precision=Precision.FLOAT32),
    "mask": RandomMask(every=3),
    "mask, structured": RandomMask(every=7, mode=Sketching.STRUCTURED, precision=Precision.BFLOAT16),
    "lowrank": LowRank(rank=4),
    "lowrank, sketched": LowRank(rank=5, mode=Sketching.SKETCHED),
    "planes": Planes(),
    "planes, bfloat16": Planes(Precision.BFLOAT16),
}


def layout_of(n_values: int) -> Layout:
    """A matrix of 12 rows with up to half the values, and a vector of the rest."""
    n_columns = n_values // 2 // ROWS
    matrix = TensorSpec("a.weight", (ROWS, n_columns), "float32", 0)
    return Layout((matrix, TensorSpec("b.bias", (n_values - ROWS * n_columns,), "float32", ROWS * n_columns)))


def context_of(n_values: int, key: int = 1, cohort_index: int = 0) -> CodecContext:
    return CodecContext(layout_of(n_values), key, cohort_index)


def gaussian(n_values: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(seed))


def heavy(n_values: int, seed: int = 0) -> torch.Tensor:
    """Signed, log-normal: as unequal as real changes."""
    return gaussian(n_values, seed).sign() * gaussian(n_values, seed + 1).exp()


def payload_of(codec: VectorCodec, values: torch.Tensor, context: CodecContext) -> bytes:
    return b"".join(codec.encode(values, context))


def decoded(codec: VectorCodec, pieces: Iterable[bytes], context: CodecContext) -> torch.Tensor:
    return torch.cat([torch.empty(0), *codec.decode(pieces, context)])


def passed(codec: VectorCodec, values: torch.Tensor, context: CodecContext) -> torch.Tensor:
    """Encoded and decoded."""
    return decoded(codec, codec.encode(values, context), context)


def relative_error(found: torch.Tensor, values: torch.Tensor) -> float:
    """||x^ - x||^2 / ||x||^2."""
    return float((found.double() - values.double()).square().sum() / values.double().square().sum())


def standard_errors(found: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """By coordinate, how far the mean of `found` (one row a key) is from `values`, beyond float32's own error.

    No coordinate's error is taken for smaller than the average: one that chance hardly ever moves may not have moved.
    """
    errors = found.double().var(0) / found.shape[0]
    off = (found.double().mean(0) - values).abs() - 1e-6 * values.abs()
    return off.clamp(min=0) / errors.clamp(min=float(errors.mean())).sqrt()
