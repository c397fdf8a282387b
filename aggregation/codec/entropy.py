"""Integers as entropy-coded bytes: small symbols packed into bytes, the few large ones apart, in one Zstandard frame.

Zstandard codes bytes with a Huffman code, which spends a bit at least on each and is at its best with some two hundred
different ones. So an integer k becomes z = (k << 1) ^ (k >> 31) (zig-zag: 0, 1, 2, 3 for 0, -1, 1, -2), of which the
least part, a symbol of `width` = 1, 2, 4 or 8 bits, goes into a byte with its neighbours. The greatest symbol,
2^width - 1, is an escape, and what z exceeds it by comes in a list of its own. With the right width level 1 stays
within 2 to 6 % of the integers' entropy from 0.9 to 6 bits, on Gaussian and on heavy-tailed values (measured: `umbel
bench codec`); single bytes need 77 % more than the entropy at 0.9 bits.

A segment of n values (2^17, the last one fewer) is written as

    ceil(n * width / 8) bytes   symbols; with m bytes, byte i holds those of values i, m + i, 2m + i, ..., lowest first
    n bytes                     the low bytes of the excesses, in the order of the values, then zeros
    n bytes                     their high bytes, likewise

so that the length before compression follows from the number of values alone; zeros take a few bytes a segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from umbel.aggregation.codec import frame
from umbel.aggregation.errors import MalformedUpdate
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT = 1 << 17
WIDTHS = (1, 2, 4, 8)


def raw_bytes(n_values: int, width: int) -> int:
    """Length before compression."""
    n_whole, n_last = divmod(n_values, SEGMENT)
    return n_whole * _segment_bytes(SEGMENT, width) + _segment_bytes(n_last, width)


def compressed_bytes_max(n_values: int) -> int:
    """No update of so many values is longer, whatever its symbols' width."""
    return frame.framed_bytes_max(raw_bytes(n_values, max(WIDTHS)))


def best_width(sample: Sequence[Tensor]) -> int:
    """The width that makes the least of these segments."""
    n_values = sum(levels.numel() for levels in sample)
    return min(WIDTHS, key=lambda width: sum(map(len, compress(sample, n_values, width))))


def compress(segments: Iterable[Tensor], n_values: int, width: int) -> Iterator[bytes]:
    """A frame of consecutive segments, piece by piece. Each has `SEGMENT` int32 within 16 bits, the last one fewer."""
    return frame.compress((to_bytes(levels, width).numpy().data for levels in segments), raw_bytes(n_values, width))


def decompress(pieces: Iterable[bytes | memoryview], n_values: int, width: int) -> Iterator[Tensor]:
    """The segments of a frame of `n_values` integers: int32. The frame comes in pieces, of any lengths.

    Raises `MalformedUpdate` for what `compress` could not have made, `LyingLength` for a wrong length.
    """
    held, n_left = bytearray(), n_values
    for piece in frame.decompress(pieces, raw_bytes(n_values, width)):
        held += piece
        while n_left and len(held) >= (n_bytes := _segment_bytes(min(SEGMENT, n_left), width)):
            yield of_bytes(torch.frombuffer(held[:n_bytes], dtype=torch.uint8), min(SEGMENT, n_left), width)
            del held[:n_bytes]
            n_left -= min(SEGMENT, n_left)


def to_bytes(levels: Tensor, width: int) -> Tensor:
    """One segment: int32, within 16 bits -> uint8."""
    folded = (levels << 1) ^ (levels >> 31)
    escape = (1 << width) - 1
    symbols = folded.clamp(max=escape)
    excess = (folded - escape)[symbols == escape]
    excess = torch.nn.functional.pad(excess, (0, levels.numel() - excess.numel()))
    made: Tensor = torch.cat((_packed(symbols, width), (excess & 0xFF).to(torch.uint8), (excess >> 8).to(torch.uint8)))
    return made


def of_bytes(data: Tensor, n_values: int, width: int) -> Tensor:
    """The inverse of `to_bytes`. Raises `MalformedUpdate` for bytes that it could not have made."""
    escape = (1 << width) - 1
    symbols = _unpacked(data[: data.numel() - 2 * n_values], n_values, width)
    excess = data[-2 * n_values :].to(torch.int32).view(2, -1)
    excess = excess[0] | excess[1] << 8
    is_escape = symbols == escape
    n_escapes = int(is_escape.sum())
    if bool(excess[n_escapes:].any()):
        raise MalformedUpdate("the update lists more large values than it has")
    folded = symbols.masked_scatter(is_escape, excess[:n_escapes] + escape)
    if n_escapes and int(folded.amax()) > 0xFFFF:
        raise MalformedUpdate("the update holds a value beyond 16 bits")
    levels: Tensor = (folded >> 1) ^ -(folded & 1)
    return levels


def entropy_bits(levels: Tensor) -> float:
    """Entropy of the integers' distribution, in bits for each: what an ideal coder of single symbols would need."""
    counts = torch.unique(levels, return_counts=True)[1].to(torch.float64)
    shares = counts / counts.sum()
    return float(-(shares * shares.log2()).sum())


def _segment_bytes(n_values: int, width: int) -> int:
    return -(-n_values * width // 8) + 2 * n_values


def _packed(symbols: Tensor, width: int) -> Tensor:
    n_in_byte = 8 // width
    n_bytes = -(-symbols.numel() // n_in_byte)
    rows = torch.nn.functional.pad(symbols, (0, n_bytes * n_in_byte - symbols.numel())).view(n_in_byte, n_bytes)
    packed = rows[0].clone()
    for i in range(1, n_in_byte):
        packed |= rows[i] << (i * width)
    return packed.to(torch.uint8)


def _unpacked(data: Tensor, n_values: int, width: int) -> Tensor:
    whole = data.to(torch.int32)
    symbols = torch.cat([(whole >> shift) & ((1 << width) - 1) for shift in range(0, 8, width)])
    if bool(symbols[n_values:].any()):
        raise MalformedUpdate("the update has values after its last")
    return symbols[:n_values]
