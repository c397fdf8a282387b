"""Codecs that send few coordinates of many: a random mask, and the k largest.

A place is written as a gap or in a bitmap. A gap is the number of coordinates since the chosen one before, in LEB128:
seven bits a byte, the lowest first, all bytes but the last with the upper bit set, no more bytes than needed. A bitmap
has one bit for each coordinate, the lowest bit of a byte first.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, Precision, bytes_of, require_finite
from umbel.aggregation.codec.vectors.codec import CodecContext, Projections, Sketching, chunks, require_encodable
from umbel.aggregation.errors import LyingLength, MalformedUpdate
from umbel.aggregation.kernels.philox import Stream, words_by_coordinate
from umbel.aggregation.model.layout import Layout

GAP_BYTES_MAX = 7  # 49 bits: no layout has more values than 2^48


def one_in_every(key: int, every: int, n_values: int, device: torch.device | str = "cpu") -> Tensor:
    """A random coordinate of each run of `every` neighbours, in increasing order: int64. `every`: 2^31 at most.

    An incomplete last run has one with the probability of its length divided by `every`.
    """
    found = [torch.empty(0, dtype=torch.int64, device=device)]
    for runs in chunks(-(-n_values // every)):  # in pieces: Philox takes ten times the memory of what it makes
        words = words_by_coordinate(key, Stream.MASK, runs.start, runs.stop - runs.start, device)
        found.append(torch.arange(runs.start, runs.stop, device=device).mul_(every).add_(words.mul_(every) >> 32))
    indices = torch.cat(found)
    return indices[indices < n_values]


def bitmap_bytes(n_values: int) -> int:
    return -(-n_values // 8)


def gaps_written(indices: Tensor) -> Tensor:
    """int64, strictly increasing -> uint8."""
    gaps = indices.clone()
    gaps[1:] -= indices[:-1] + 1
    lengths = torch.ones_like(gaps)
    for n_bytes in range(1, GAP_BYTES_MAX):
        lengths += gaps >= 1 << 7 * n_bytes
    ends = lengths.cumsum(0)
    out = torch.zeros(int(ends[-1]) if gaps.numel() else 0, dtype=torch.uint8, device=indices.device)
    for place in range(GAP_BYTES_MAX):
        has = lengths > place
        goes_on = (lengths[has] > place + 1).to(torch.int64) << 7
        out[(ends - lengths + place)[has]] = (gaps[has] >> 7 * place & 0x7F | goes_on).to(torch.uint8)
    return out


def gaps_read(data: Tensor, count: int, n_values: int) -> Tensor:
    """The inverse of `gaps_written`: `count` indices below `n_values`. Raises `MalformedUpdate` or `LyingLength`."""
    is_last = data < 0x80
    if int(is_last.sum()) != count or (data.numel() and not bool(is_last[-1])):
        raise LyingLength(f"the payload lists {int(is_last.sum())} coordinates but declares {count}")
    ends = is_last.nonzero().view(-1)
    lengths = torch.diff(ends, prepend=torch.tensor([-1]))
    if bool((lengths > GAP_BYTES_MAX).any()) or bool(((data[ends] == 0) & (lengths > 1)).any()):
        raise MalformedUpdate("a gap between coordinates takes more bytes than it needs")
    gaps = _gaps(data, ends, lengths)
    if float(gaps.sum(dtype=torch.float64)) + count > n_values * (1 + 1e-9) + 1:  # so that no sum below can wrap
        raise MalformedUpdate(f"the payload lists a coordinate beyond the last one; the update has {n_values} values")
    indices = (gaps + 1).cumsum(0) - 1
    if count and int(indices[-1]) >= n_values:
        raise MalformedUpdate(f"the payload lists coordinate {int(indices[-1])}; the last one is {n_values - 1}")
    return indices


def bitmap_written(indices: Tensor, n_values: int) -> Tensor:
    """int64 -> uint8."""
    bits = torch.zeros(8 * bitmap_bytes(n_values), dtype=torch.uint8, device=indices.device)
    bits[indices] = 1
    places = torch.arange(8, dtype=torch.uint8, device=indices.device)
    return (bits.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def bitmap_read(data: Tensor, count: int, n_values: int) -> Tensor:
    """The inverse of `bitmap_written`. Raises `LyingLength`, and `MalformedUpdate` for bits past the end."""
    if data.numel() != bitmap_bytes(n_values):
        raise LyingLength(
            f"a bitmap of {n_values} coordinates must have {bitmap_bytes(n_values)} bytes, not {data.numel()}"
        )
    indices = (data.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1).view(-1).nonzero().view(-1)
    if indices.numel() != count:
        raise LyingLength(f"the bitmap has {indices.numel()} coordinates, but the payload declares {count}")
    if count and int(indices[-1]) >= n_values:
        raise MalformedUpdate(f"the bitmap lists coordinate {int(indices[-1])}; the last one is {n_values - 1}")
    return indices


def scattered(indices: Tensor, values: Tensor, n_values: int) -> Iterator[Tensor]:
    """`values` at `indices` (increasing), and zeros: consecutive chunks of a vector of `n_values`."""
    starts = torch.tensor([place.start for place in chunks(n_values)] + [n_values])
    bounds: list[int] = torch.searchsorted(indices, starts).tolist()
    for number, place in enumerate(chunks(n_values)):
        mine = slice(bounds[number], bounds[number + 1])
        chunk = torch.zeros(place.stop - place.start)
        chunk[indices[mine] - place.start] = values[mine]
        yield chunk


def _gaps(data: Tensor, ends: Tensor, lengths: Tensor) -> Tensor:
    gaps = torch.zeros_like(ends)
    for place in range(GAP_BYTES_MAX):
        has = lengths > place
        gaps[has] |= (data[(ends - lengths + 1 + place)[has]].to(torch.int64) & 0x7F) << 7 * place
    return gaps


EVERY_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class RandomMask:
    """A random mask: one coordinate in every `every`, the same for the whole cohort, drawn from each round's key.

    Konecny, McMahan, Yu, Richtarik, Suresh and Bacon: Federated learning: strategies for improving communication
    efficiency (2016). Structured: the client trains only the chosen coordinates (`trained`). Sketched: it trains all,
    and each sent value counts `every` times.

    The mask has one coordinate in each run of `every` neighbours, at a place drawn by Philox. So each coordinate is
    chosen with probability 1 / `every`, and their number is known beforehand, up to one (the place in an incomplete
    last run may lie past the end; then none is chosen there).

    Sketched it is **unbiased**. Structured it returns the part of a change within the mask, exactly. **Linear** with
    float32, up to its rounding: payloads can be added as vectors. With bfloat16 each client rounds for itself.
    Stateless. **Cost**: 32 or 16 bits a chosen coordinate. Error, sketched: (`every` - 1) ||x||^2, which is large: use
    it where the client trains within the mask, or with error feedback.
    """

    every: int = 10
    mode: Sketching = Sketching.SKETCHED
    precision: Precision = Precision.FLOAT32

    def __post_init__(self) -> None:
        if not 1 <= self.every <= EVERY_MAX:
            raise ValueError(f"`every` must lie between 1 and {EVERY_MAX}, not {self.every}")

    @property
    def is_contraction(self) -> bool:
        return self.mode is Sketching.STRUCTURED

    @property
    def is_linear(self) -> bool:
        return self.precision is Precision.FLOAT32

    def payload_bytes(self, layout: Layout) -> range:
        """One length, or two if the last run is incomplete."""
        n_whole, n_left = divmod(layout.n_values, self.every)
        return range(n_whole * self.precision.n_bytes, (n_whole + bool(n_left)) * self.precision.n_bytes + 1)

    def chosen(self, context: CodecContext, device: torch.device | str = "cpu") -> Tensor:
        """The coordinates of this round's mask, in increasing order: int64."""
        return one_in_every(context.shared_key("mask"), self.every, context.n_values, device)

    def trained(self, context: CodecContext) -> dict[str, Tensor]:
        """For each owner, the values that a client trains in a structured round: bool, of the tensor's shape."""
        is_chosen = torch.zeros(context.n_values, dtype=torch.bool)
        is_chosen[self.chosen(context)] = True
        return {spec.name: is_chosen[spec.place].view(spec.shape) for spec in context.layout.owners()}

    def projections(self, context: CodecContext) -> Projections:
        """By tensor, the projection of a gradient onto the coordinates that a structured round trains."""
        return {name: _times(mask) for name, mask in self.trained(context).items()}

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        require_encodable(values, context)
        yield from bytes_of(self.precision.written(values[self.chosen(context, values.device)]))

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        payload, places = Payload(pieces), self.chosen(context)
        values = self.precision.read(payload.take(places.numel() * self.precision.n_bytes))
        payload.end()
        if self.mode is Sketching.SKETCHED:
            values = require_finite(values * self.every)
        yield from scattered(places, values, context.n_values)


def _times(mask: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * mask.to(gradient.device)


SHARE_MIN = 1e-9
_HEAD = struct.Struct("<BQ")
_GAPS, _BITMAP = 0, 1
_SAMPLE_MIN = 1 << 16  # a shorter vector is not sampled
_SAMPLE_OF = 64  # one in 64 coordinates of a longer one
_SLACK = 4.0  # standard deviations of the number of sampled values among the k largest


@dataclass(frozen=True, slots=True)
class TopK:
    """Top-k: the k coordinates of largest magnitude, and their places.

    Aji and Heafield: Sparse communication for distributed gradient descent (EMNLP 2017); Alistarh, Hoefler, Johansson,
    Konstantinov, Khirirat and Renggli: The convergence of sparsified gradient methods (NeurIPS 2018). The threshold
    comes from a sample (Lin, Han, Mao, Wang and Dally: Deep gradient compression, ICLR 2018, section 3). It is so low
    that almost always more than k coordinates exceed it, and only these are sorted, so the cost is O(d). Never more
    than k are sent, and fewer after an unlucky sample.

    **Biased**: use it with error feedback (`feedback.py`). It is a contraction: ||x^ - x||^2 <= (1 - k / d) ||x||^2,
    except with an unlucky sample. **Not linear**: each client has its own coordinates. Stateless.
    **Cost** of each of the k: 32 or 16 bits for the value, and for its place 8 bits if gaps are below 128 (down to
    about 1 in 60) or 16 bits at 1 in 1,000; never more than one bit for each coordinate of the vector.

    ```
    offset size field
         0    1 places          0 = gaps, 1 = a bitmap: the shorter one
         1    8 count           how many coordinates, little-endian; k at most
         9      values          float32 or bfloat16, by coordinate
                places          gaps or bitmap
    ```
    """

    share: float = 0.01  # k / d, 1e-9 to 1; at least one coordinate is sent
    precision: Precision = Precision.BFLOAT16
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not SHARE_MIN <= self.share <= 1:
            raise ValueError(f"`share` must lie between {SHARE_MIN:g} and 1, not {self.share}")

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
            raise MalformedUpdate(
                f"the byte that says how places are written must be 0 (gaps) or 1 (a bitmap), not {places}"
            )
        if count > self.k(n_values):
            raise LyingLength(f"the payload declares {count} coordinates; the plan allows at most {self.k(n_values)}")
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
