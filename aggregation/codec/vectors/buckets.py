"""Codecs with a scale for each bucket of 4,096 neighbouring values, because layers differ by orders of magnitude.

1-bit SGD scales column by column, TernGrad layer by layer, QSGD bucket by bucket. Buckets follow layers nearly as well
as the layout does, and their cost depends on the number of values only. Scales are each client's own, so none of these
codecs is linear.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.frame import compress, decompress, framed_bytes_max
from umbel.aggregation.codec.entropy.payload import Buffer, Payload, at_most, bytes_of, require_finite, scales_written
from umbel.aggregation.codec.vectors.codec import CodecContext, chunk_lengths, chunks, one_length, require_encodable
from umbel.aggregation.errors import MalformedUpdate, UpdateOutOfRange
from umbel.aggregation.kernels.packing import pack, packed_bytes, unpack_all
from umbel.aggregation.kernels.philox import uniforms
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.stated_order import total

BUCKET_VALUES = 1 << 12


def n_buckets(n_values: int) -> int:
    return -(-n_values // BUCKET_VALUES)


def in_buckets(values: Tensor) -> Tensor:
    """One dimension -> (n_buckets, BUCKET_VALUES), padded with zeros."""
    n_missing = n_buckets(values.numel()) * BUCKET_VALUES - values.numel()
    return torch.nn.functional.pad(values, (0, n_missing)).view(-1, BUCKET_VALUES)


def lengths(n_values: int, device: torch.device | str = "cpu") -> Tensor:
    """The number of values in each bucket: int64."""
    full = torch.full((n_buckets(n_values),), BUCKET_VALUES, dtype=torch.int64, device=device)
    if n_values % BUCKET_VALUES:
        full[-1] = n_values % BUCKET_VALUES
    return full


def by_value(scales: Tensor, n_values: int) -> Tensor:
    """The scale of each value's bucket."""
    return scales.repeat_interleave(BUCKET_VALUES)[:n_values]


@dataclass(frozen=True, slots=True)
class Sign:
    """1-bit SGD: one bit a coordinate says on which side of zero it lies; a bucket has the mean of each side.

    Seide, Fu, Droppo, Li and Yu: 1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs (Interspeech 2014), with buckets for columns of a weight matrix. The two scales are the mean
    of the values that are not negative and the mean |x| of the others. No other pair has a smaller squared error.

    **Biased**: use it with error feedback (`feedback.py`). It is a contraction: in each bucket of n values
    ||x^ - x||^2 <= (1 - ||x||_1^2 / (n ||x||^2)) ||x||^2, which for Gaussian values is 1 - 2/pi = 0.363.
    **Not linear**. Stateless. **Cost**: 1 bit a coordinate and 64 bits a bucket, so 1.016.

    Payload, chunk by chunk: the scales of the upper sides, those of the lower sides, then the signs.
    """

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
    """By bucket: the means of the upper sides, then the mean sizes of the lower ones; 0 for an empty side. float64."""
    n_minus = in_buckets(is_minus).sum(1)
    wide = in_buckets(chunk.to(torch.float64))
    upper = total(wide.clamp(min=0)) / (lengths(chunk.numel(), chunk.device) - n_minus).clamp(min=1)
    lower = total(wide.clamp(max=0)).neg() / n_minus.clamp(min=1)
    return torch.cat((upper, lower))


TRITS_A_BYTE = 5
BYTES_WITH_MEANING = 3**TRITS_A_BYTE
_POWERS = tuple(3**place for place in range(TRITS_A_BYTE))


@dataclass(frozen=True, slots=True)
class Ternary:
    """TernGrad: each coordinate becomes -s, 0 or +s at random, so that its expectation is right.

    Wen, Xu, Yan, Wu, Wang, Chen and Li: TernGrad: ternary gradients to reduce communication in distributed deep
    learning (NIPS 2017): x^_j = s sign(x_j) b_j with P(b_j = 1) = |x_j| / s and s = max |x|, here by bucket, there by
    layer. With `clip_sigmas`, values beyond that many standard deviations (about zero) are cut first.

    **Unbiased** without clipping (to 2^-24 s, what float32 holds), biased with it. **Not linear**. Stateless. Error in
    a bucket: s ||x||_1 - ||x||^2, which clipping makes much smaller.
    **Cost**: 1.6 bits a coordinate (five trits in a byte; the entropy of three equally likely values is 1.585), and 32
    bits a bucket.

    Payload, chunk by chunk: scales, then trits.
    """

    clip_sigmas: float | None = None  # cut values at this many standard deviations of the bucket (paper: 2.5); None: no
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.clip_sigmas is not None and not 1 <= self.clip_sigmas <= BUCKET_VALUES:
            raise ValueError(f"`clip_sigmas` must lie between 1 and {BUCKET_VALUES}, not {self.clip_sigmas}")

    def payload_bytes(self, layout: Layout) -> range:
        n_values = layout.n_values
        return one_length(4 * n_buckets(n_values) + sum(trit_bytes(n) for n in chunk_lengths(n_values)))

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
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
        raise MalformedUpdate(
            f"a byte of the update is {BYTES_WITH_MEANING} or more, so it does not hold five ternary values"
        )
    digits = torch.arange(BYTES_WITH_MEANING).unsqueeze(1) // torch.tensor(_POWERS) % 3
    trits = torch.where(digits == 2, -1, digits).to(torch.float32)[data.to(torch.int64)].view(-1)
    if bool(trits[n_values:].any()):
        raise MalformedUpdate("the padding after the update's last ternary value is not zero")
    return trits[:n_values]


LEVELS_MAX = 32_767


@dataclass(frozen=True, slots=True)
class Qsgd:
    """QSGD: each coordinate becomes one of s levels of its bucket's norm, rounded up or down at random.

    Alistarh, Grubic, Li, Tomioka and Vojnovic: QSGD: communication-efficient SGD via gradient quantization and
    encoding (NIPS 2017): with y_j = s |x_j| / ||x||_2, the level is floor(y_j), or one more with the probability
    y_j - floor(y_j).

    **Unbiased** (to 2^-24 of a level). **Not linear**. Stateless. Error: at most min(n / s^2, sqrt(n) / s) ||x||^2 in a
    bucket of n values (the paper's lemma 3.1).
    **Cost**: 32 bits a bucket and the levels as zig-zag bytes, the low bytes apart from the high ones (which s <= 127
    does not need), in one Zstandard frame: 2.66 bits a coordinate of Gaussian values with s = 64 = sqrt(n), at an error
    of 0.167 ||x||^2; 1.64 bits and 2.2 ||x||^2 with s = 16.
    """

    levels: int = 64  # s, 1 to 32,767
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= LEVELS_MAX:
            raise ValueError(f"`levels` must lie between 1 and {LEVELS_MAX}, not {self.levels}")

    @property
    def n_planes(self) -> int:
        """The bytes of a level; zig-zag doubles its range."""
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
                raise UpdateOutOfRange(f"a level of the update is not between -{self.levels} and {self.levels}")
            yield require_finite(levels.to(torch.float32).div_(self.levels).mul_(by_value(norms, n)))
        payload.end()

    def _raw_bytes(self, n_values: int) -> int:
        return 4 * n_buckets(n_values) + self.n_planes * n_values

    def _raw(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        """Chunk by chunk: norms, then byte planes."""
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
    """int64 -> uint8: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...; first all low bytes, then all high bytes."""
    folded = (levels << 1) ^ (levels >> 63)
    return torch.cat([folded >> 8 * plane & 0xFF for plane in range(n_planes)]).to(torch.uint8)


def zig_zag_read(data: Tensor, n_planes: int) -> Tensor:
    """The inverse."""
    planes = data.view(n_planes, -1).to(torch.int64)
    folded = planes[0] if n_planes == 1 else planes[0] | planes[1] << 8
    return (folded >> 1) ^ -(folded & 1)
