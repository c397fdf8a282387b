"""One bit a coordinate: which side of zero, and the mean of each side.

Seide, Fu, Droppo, Li and Yu: 1-bit stochastic gradient descent and its application to data-parallel distributed
training of speech DNNs (Interspeech 2014): there by column of a weight matrix, here by bucket of 4,096 coordinates.
Both sides have a scale of their own: the mean of the values that are not negative, and the mean |x| of those that are,
which of all pairs of scales has the least squared error.

**Biased**: use it with error feedback (`feedback.py`). It never moves away: in each bucket of n values
||x^ - x||^2 <= (1 - ||x||_1^2 / (n ||x||^2)) ||x||^2, which for Gaussian values is 1 - 2/pi = 0.363.
**Not linear** (scales are each client's). Stateless. **Cost**: 1 bit a coordinate and 64 bits a bucket, so 1.016.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, bytes_of, scales_written
from umbel.aggregation.codec.kernels.packing import pack, packed_bytes, unpack_all
from umbel.aggregation.codec.vectors.buckets import by_value, in_buckets, lengths, n_buckets
from umbel.aggregation.codec.vectors.codec import CodecContext, chunk_lengths, chunks, one_length, require_encodable
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.stated_order import total
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sign:
    """1-bit SGD's quantizer. Chunk by chunk: the scales of the upper side, those of the lower, then the signs."""

    is_unbiased: bool = field(default=False, init=False)
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=True, init=False)

    def payload_bytes(self, layout: Layout) -> range:
        n_values = layout.n_values
        return one_length(8 * n_buckets(n_values) + sum(packed_bytes(n, 1) for n in chunk_lengths(n_values)))

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        require_encodable(values, context)
        for place in chunks(context.n_values):
            chunk = values[place]
            is_minus = chunk < 0
            yield from bytes_of(scales_written(_means(chunk, is_minus)))
            yield from bytes_of(pack(is_minus.to(torch.int32), 1))

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        payload = Payload(pieces)
        for n in chunk_lengths(context.n_values):
            upper, lower = payload.take_scales(2 * n_buckets(n)).chunk(2)
            is_minus = unpack_all(payload.take(packed_bytes(n, 1)), n, 1).to(torch.bool)
            yield torch.where(is_minus, -by_value(lower, n), by_value(upper, n))
        payload.end()


def _means(chunk: Tensor, is_minus: Tensor) -> Tensor:
    """By bucket, the mean of the upper side, then the mean size of the lower one; 0 for an empty side. float64."""
    n_minus = in_buckets(is_minus).sum(1)
    wide = in_buckets(chunk.to(torch.float64))
    upper = total(wide.clamp(min=0)) / (lengths(chunk.numel(), chunk.device) - n_minus).clamp(min=1)
    lower = total(wide.clamp(max=0)).neg() / n_minus.clamp(min=1)
    return torch.cat((upper, lower))
