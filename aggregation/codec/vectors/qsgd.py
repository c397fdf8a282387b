"""QSGD: each coordinate on one of s levels of its bucket's norm, up or down by chance.

Alistarh, Grubic, Li, Tomioka and Vojnovic: QSGD: communication-efficient SGD via gradient quantization and encoding
(NIPS 2017): with y_j = s |x_j| / ||x||_2, the level is floor(y_j), or one more with the probability of
what floor has cut off. Norms are taken by bucket of n = 4,096 coordinates, as in the paper's experiments.

**Unbiased** (to 2^-24 of a level). **Not linear**: the norms are each client's. Stateless.
Error: at most min(n / s^2, sqrt(n) / s) ||x||^2 (the paper's lemma 3.1).
**Cost**: levels are zig-zag bytes, low and high plane apart (no high plane up to s = 127), in one Zstandard frame,
and 32 bits a bucket: 2.66 bits a coordinate of Gaussian values with s = 64 = sqrt(n), at an error of
0.167 ||x||^2; 1.64 bits and 2.2 with s = 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbel.aggregation.codec.entropy.frame import compress, decompress, framed_bytes_max
from umbel.aggregation.codec.entropy.payload import Buffer, Payload, at_most, bytes_of, require_finite, scales_written
from umbel.aggregation.codec.kernels.philox import uniforms
from umbel.aggregation.codec.vectors.buckets import by_value, in_buckets, n_buckets
from umbel.aggregation.codec.vectors.codec import CodecContext, chunk_lengths, chunks, require_encodable
from umbel.aggregation.errors import UpdateOutOfRange
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.stated_order import total
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

LEVELS_MAX = 32_767


@dataclass(frozen=True, slots=True)
class Qsgd:
    """`levels`: s, from 1 to 32,767; the square root of a bucket is 64."""

    levels: int = 64
    is_unbiased: bool = field(default=True, init=False)
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= LEVELS_MAX:
            raise ValueError(f"QSGD has 1 to {LEVELS_MAX} levels, not {self.levels}")

    @property
    def n_planes(self) -> int:
        """Bytes of a level: zig-zag doubles it."""
        return 1 if 2 * self.levels <= 0xFF else 2

    def payload_bytes(self, layout: Layout) -> range:
        return range(1, framed_bytes_max(self._raw_bytes(layout.n_values)) + 1)

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        require_encodable(values, context)
        yield from compress(self._raw(values, context), self._raw_bytes(context.n_values))

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        framed = at_most(pieces, self.payload_bytes(context.layout)[-1])
        payload = Payload(decompress(framed, self._raw_bytes(context.n_values)))
        for n in chunk_lengths(context.n_values):
            norms = payload.take_scales(n_buckets(n))
            levels = zig_zag_read(payload.take(n * self.n_planes), self.n_planes)
            if bool((levels.abs() > self.levels).any()):
                raise UpdateOutOfRange(f"a level lies beyond {self.levels}")
            yield require_finite(levels.to(torch.float32).div_(self.levels).mul_(by_value(norms, n)))
        payload.end()

    def _raw_bytes(self, n_values: int) -> int:
        return 4 * n_buckets(n_values) + self.n_planes * n_values

    def _raw(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        """Chunk by chunk: norms, then planes."""
        key = context.own_key("qsgd")
        for place in chunks(context.n_values):
            chunk = values[place]
            norms = total(in_buckets(chunk).to(torch.float64).square_()).sqrt()
            yield from bytes_of(scales_written(norms))
            size = (
                chunk.abs().to(torch.float64)
                / by_value(torch.where(norms > 0, norms, 1.0), chunk.numel())
                * self.levels
            )
            whole = size.floor()
            is_more = uniforms(key, place.start, chunk.numel(), chunk.device) < size - whole
            levels = (whole + is_more).clamp_(max=self.levels).copysign_(chunk)
            yield from bytes_of(zig_zag_written(levels.to(torch.int64), self.n_planes))


def zig_zag_written(levels: Tensor, n_planes: int) -> Tensor:
    """int64 -> uint8: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..., the low byte of each, then the high byte of each."""
    folded = (levels << 1) ^ (levels >> 63)
    return torch.cat([folded >> 8 * plane & 0xFF for plane in range(n_planes)]).to(torch.uint8)


def zig_zag_read(data: Tensor, n_planes: int) -> Tensor:
    """The inverse."""
    planes = data.view(n_planes, -1).to(torch.int64)
    folded = planes[0] if n_planes == 1 else planes[0] | planes[1] << 8
    return (folded >> 1) ^ -(folded & 1)
