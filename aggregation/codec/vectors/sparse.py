"""Few coordinates of many: drawn at random, written as gaps or as a bitmap, and scattered into chunks.

A gap is the number of coordinates since the chosen one before. It takes one byte for every seven bits, the lowest
first, all but the last with the upper bit set (LEB128), and no unneeded byte. A bitmap has one bit for each coordinate,
in bytes, the lowest bit first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from umbel.aggregation.codec.kernels.philox import Stream, words_by_coordinate
from umbel.aggregation.codec.vectors.codec import chunks
from umbel.aggregation.errors import LyingLength, MalformedUpdate
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

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
    """Length of a bitmap."""
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
        raise MalformedUpdate(f"the payload names a coordinate beyond {n_values}")
    indices = (gaps + 1).cumsum(0) - 1
    if count and int(indices[-1]) >= n_values:
        raise MalformedUpdate(f"the payload names coordinate {int(indices[-1])} of {n_values}")
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
        raise LyingLength(f"a bitmap of {n_values} coordinates takes {bitmap_bytes(n_values)} bytes")
    indices = (data.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1).view(-1).nonzero().view(-1)
    if indices.numel() != count:
        raise LyingLength(f"the bitmap has {indices.numel()} coordinates, but the payload declares {count}")
    if count and int(indices[-1]) >= n_values:
        raise MalformedUpdate(f"the bitmap names coordinate {int(indices[-1])} of {n_values}")
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
    """int64, 49 bits at most."""
    gaps = torch.zeros_like(ends)
    for place in range(GAP_BYTES_MAX):
        has = lengths > place
        gaps[has] |= (data[(ends - lengths + 1 + place)[has]].to(torch.int64) & 0x7F) << 7 * place
    return gaps
