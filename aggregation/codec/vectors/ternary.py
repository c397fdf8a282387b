"""TernGrad: each coordinate becomes -s, 0 or +s, by chance so that its expectation is right.

Wen, Xu, Yan, Wu, Wang, Chen and Li: TernGrad: ternary gradients to reduce communication in distributed deep learning
(NIPS 2017): x^_j = s sign(x_j) b_j with P(b_j = 1) = |x_j| / s and s = max |x|, here by bucket of 4,096
coordinates (there by layer); and, if asked for, what exceeds 2.5 standard deviations (here about zero) is cut first.

**Unbiased** without clipping (to 2^-24 s, what float32 holds), biased with it. **Not linear**: the scales are each
client's. Stateless. Error in a bucket: s ||x||_1 - ||x||^2, which clipping makes much smaller.
**Cost**: five trits in a byte (3^5 = 243 of 256 values), so 1.6 bits a coordinate where 2-bit fields would take 2 and
the entropy of three equally likely values is 1.585; and 32 bits a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, bytes_of, scales_written
from umbel.aggregation.codec.kernels.philox import uniforms
from umbel.aggregation.codec.vectors.buckets import BUCKET_VALUES, by_value, in_buckets, lengths, n_buckets
from umbel.aggregation.codec.vectors.codec import CodecContext, chunk_lengths, chunks, one_length, require_encodable
from umbel.aggregation.errors import MalformedUpdate
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.stated_order import total
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

TRITS_A_BYTE = 5
BYTES_WITH_MEANING = 3**TRITS_A_BYTE
_POWERS = tuple(3**place for place in range(TRITS_A_BYTE))


@dataclass(frozen=True, slots=True)
class Ternary:
    """TernGrad's quantizer."""

    clip_sigmas: float | None = None  # cut values at this many standard deviations of the bucket (paper: 2.5); None: no
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.clip_sigmas is not None and not 1 <= self.clip_sigmas <= BUCKET_VALUES:
            raise ValueError(f"clip_sigmas must lie between 1 and {BUCKET_VALUES}, not {self.clip_sigmas}")

    @property
    def is_unbiased(self) -> bool:
        return self.clip_sigmas is None

    def payload_bytes(self, layout: Layout) -> range:
        n_values = layout.n_values
        return one_length(4 * n_buckets(n_values) + sum(trit_bytes(n) for n in chunk_lengths(n_values)))

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        """Chunk by chunk: scales, then trits."""
        require_encodable(values, context)
        key = context.own_key("ternary")
        for place in chunks(context.n_values):
            chunk = values[place]
            scales = self._scales(chunk)
            share = chunk.abs() / by_value(torch.where(scales > 0, scales, 1.0), chunk.numel())
            is_sent = uniforms(key, place.start, chunk.numel(), chunk.device) < share
            yield from bytes_of(scales_written(scales))
            yield from bytes_of(trits_written(torch.where(is_sent, chunk.sign(), 0.0)))

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        payload = Payload(pieces)
        for n in chunk_lengths(context.n_values):
            scales = payload.take_scales(n_buckets(n))
            yield trits_read(payload.take(trit_bytes(n)), n).mul_(by_value(scales, n))
        payload.end()

    def _scales(self, chunk: Tensor) -> Tensor:
        """By bucket: float32."""
        sizes = in_buckets(chunk).abs()
        largest = sizes.amax(1)
        if self.clip_sigmas is None:
            return largest
        variances = total(sizes.to(torch.float64).square_()) / lengths(chunk.numel(), chunk.device)
        return torch.minimum(largest, (variances.sqrt_() * self.clip_sigmas).to(torch.float32))


def trit_bytes(n_values: int) -> int:
    """The bytes of `n_values` trits."""
    return -(-n_values // TRITS_A_BYTE)


def trits_written(values: Tensor) -> Tensor:
    """-1, 0 and +1 -> uint8, five to a byte, the first worth least; digits 0, 1 and 2 are 0, +1 and -1."""
    digits = torch.where(values < 0, 2, values.to(torch.int64))
    filled = torch.nn.functional.pad(digits, (0, trit_bytes(values.numel()) * TRITS_A_BYTE - values.numel()))
    powers = torch.tensor(_POWERS, device=values.device)
    return (filled.view(-1, TRITS_A_BYTE) * powers).sum(1).to(torch.uint8)


def trits_read(data: Tensor, n_values: int) -> Tensor:
    """The inverse, as float32. Raises `MalformedUpdate` for bytes of 243 and more, and for trits past the end."""
    if bool((data >= BYTES_WITH_MEANING).any()):
        raise MalformedUpdate(f"a byte of {BYTES_WITH_MEANING} or more holds no five trits")
    digits = torch.arange(BYTES_WITH_MEANING).unsqueeze(1) // torch.tensor(_POWERS) % 3
    trits = torch.where(digits == 2, -1, digits).to(torch.float32)[data.to(torch.int64)].view(-1)
    if bool(trits[n_values:].any()):
        raise MalformedUpdate("trits follow the last coordinate")
    return trits[:n_values]
