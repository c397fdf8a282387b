"""Top-k: the k coordinates of largest magnitude, and their places.

Aji and Heafield: Sparse communication for distributed gradient descent (EMNLP 2017); Alistarh, Hoefler, Johansson,
Konstantinov, Khirirat and Renggli: The convergence of sparsified gradient methods (NeurIPS 2018). The threshold comes
from a sample, as in Lin, Han, Mao, Wang and Dally: Deep gradient compression (ICLR 2018), section 3. It is so low that
almost always more than k coordinates exceed it, and only these are sorted, so the cost is O(d). Never more than k are
sent; fewer, if the sample was unlucky.

**Biased**: use it with error feedback (`feedback.py`). The error never exceeds the vector:
||x^ - x||^2 <= (1 - k / d) ||x||^2, except with an unlucky sample. **Not linear**: each client has its own coordinates.
Stateless. **Cost** of each of the k: 32 or 16 bits for the value, and for its place 8 bits if gaps are below 128 (down
to about 1 in 60) or 16 bits at 1 in 1,000; never more than one bit for each coordinate of the vector.

```
offset size field
     0    1 places          0 = gaps, 1 = a bitmap: whichever is shorter
     1    8 count           how many coordinates, little-endian; k at most
     9      values          float32 or bfloat16, by coordinate
            places          gaps or bitmap (`sparse.py`)
```
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, Precision, bytes_of
from umbel.aggregation.codec.vectors.codec import CodecContext, require_encodable
from umbel.aggregation.codec.vectors.sparse import (
    GAP_BYTES_MAX,
    bitmap_bytes,
    bitmap_read,
    bitmap_written,
    gaps_read,
    gaps_written,
    one_in_every,
    scattered,
)
from umbel.aggregation.errors import LyingLength, MalformedUpdate
from umbel.aggregation.model.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

SHARE_MIN = 1e-9
_HEAD = struct.Struct("<BQ")
_GAPS, _BITMAP = 0, 1
_SAMPLE_MIN = 1 << 16  # a shorter vector is not sampled
_SAMPLE_OF = 64  # one in 64 coordinates of a longer one
_SLACK = 4.0  # standard deviations of the number of sampled values among the k largest


@dataclass(frozen=True, slots=True)
class TopK:
    """`share`: k / d, 1e-9 to 1; at least one coordinate is sent."""

    share: float = 0.01
    precision: Precision = Precision.BFLOAT16
    is_unbiased: bool = field(default=False, init=False)
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not SHARE_MIN <= self.share <= 1:
            raise ValueError(f"the share of coordinates must lie between {SHARE_MIN:g} and 1, not {self.share}")

    def k(self, n_values: int) -> int:
        """The greatest number of coordinates that are sent."""
        return min(n_values, max(1, round(self.share * n_values)))

    def payload_bytes(self, layout: Layout) -> range:
        n_values, k = layout.n_values, self.k(layout.n_values)
        most = _HEAD.size + k * self.precision.n_bytes + min(k * GAP_BYTES_MAX, bitmap_bytes(n_values))
        return range(_HEAD.size, most + 1)

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        require_encodable(values, context)
        indices = largest(values, self.k(context.n_values), context.own_key("topk"))
        gaps = gaps_written(indices)
        is_bitmap = gaps.numel() > bitmap_bytes(context.n_values)
        yield _HEAD.pack(_BITMAP if is_bitmap else _GAPS, indices.numel())
        yield from bytes_of(self.precision.written(values[indices]))
        yield from bytes_of(bitmap_written(indices, context.n_values) if is_bitmap else gaps)

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        payload, n_values = Payload(pieces), context.n_values
        places, count = _HEAD.unpack(payload.take(_HEAD.size).numpy().tobytes())
        if places not in (_GAPS, _BITMAP):
            raise MalformedUpdate(f"places are gaps (0) or a bitmap (1), not {places}")
        if count > self.k(n_values):
            raise LyingLength(f"the payload declares {count} coordinates; the plan allows {self.k(n_values)}")
        values = self.precision.read(payload.take(count * self.precision.n_bytes))
        rest = payload.take_rest(bitmap_bytes(n_values))
        indices = (bitmap_read if places == _BITMAP else gaps_read)(rest, count, n_values)
        yield from scattered(indices, values, n_values)


def largest(values: Tensor, k: int, key: int) -> Tensor:
    """The places of the k values of largest magnitude, in increasing order: int64. Zeros are left out.

    Among values as large as the k-th, the first are taken.
    """
    sizes = values.abs()
    passed = ((sizes >= _threshold(sizes, k, key)) & (sizes > 0)).nonzero().view(-1)
    return passed if passed.numel() <= k else passed[_first_of_the_largest(sizes[passed], k)]


def _first_of_the_largest(sizes: Tensor, k: int) -> Tensor:
    """Which of these are the k largest: bool."""
    least = sizes.topk(k, sorted=False).values.min()
    is_more, is_as_large = sizes > least, sizes == least
    return is_more | (is_as_large & (is_as_large.cumsum(0) <= k - is_more.sum()))


def _threshold(sizes: Tensor, k: int, key: int) -> Tensor:
    """A magnitude that about k of all exceed, rather more than fewer."""
    n_values = sizes.numel()
    if n_values <= _SAMPLE_MIN:
        return sizes.new_zeros(())
    every = -(-n_values // max(_SAMPLE_MIN, n_values // _SAMPLE_OF))
    sample = sizes[one_in_every(key, every, n_values, sizes.device)]
    expected = k / every
    rank = int(expected + _SLACK * expected**0.5 + _SLACK)
    return sizes.new_zeros(()) if rank >= sample.numel() else sample.topk(rank, sorted=False).values.min()
