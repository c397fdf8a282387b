"""Integers as entropy-coded bytes: class by class, small symbols packed into bytes, the few large ones apart.

Zstandard codes bytes with a Huffman code, which takes at least a bit for each byte and works best with some two hundred
different ones. So an integer k becomes z = (k << 1) ^ (k >> 31) (zig-zag: 0, 1, 2, 3 for 0, -1, 1, -2). The lowest 1,
2, 4 or 8 bits of z are a symbol, and a byte holds symbols of one class (`classes.py`). Each class has its own width and
its own code table. The greatest symbol, 2^width - 1, is an escape, and a list holds z minus the escape. With the right
width, level 1 stays within 2 to 6 % of the integers' entropy from 0.9 to 6 bits, on Gaussian and on heavy-tailed
values; single bytes need 77 % more than the entropy at 0.9 bits.

A segment of 2^20 values (the last one fewer) is the length of a Zstandard frame, 4 bytes, and the frame, which holds

    for each class, 0 to 31, of n values:
    ceil(n * width / 8) = m bytes   symbols; byte i holds those of values i, m + i, 2 m + i, ..., lowest first
    then, of all classes:
    as many bytes as escapes        the low bytes of the excesses, in the order of their values
    as many bytes as escapes        their high bytes, likewise

The number of values of each class is known before the frame is read. So the sender decides only the number of escapes,
by the length that the frame claims, and it cannot exceed the number of values.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy import entropy_kernels as kernels
from umbel.aggregation.codec.entropy.entropy_kernels import N_CLASSES, WIDTHS, Counted, packed_bytes
from umbel.aggregation.codec.entropy.frame import compress_apart, compressed_bytes, decompress_whole, framed_bytes_max
from umbel.aggregation.codec.entropy.payload import Payload
from umbel.aggregation.errors import LyingLength, MalformedUpdate
from umbel.aggregation.kernels.native import Folded, Unpacked

SEGMENT = 1 << 20
Widths: TypeAlias = tuple[int, ...]
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Segment:
    folded: Folded  # known before the levels are put in place
    by_class: Tensor
    counted: Counted

    def levels(self) -> Tensor:
        """int32, in the order of the coordinates."""
        return kernels.in_place(self.by_class, self.counted)


def written_bytes_max(n_values: int) -> int:
    """The greatest length of all segments of `n_values` values."""
    n_whole, n_last = divmod(n_values, SEGMENT)
    return n_whole * _framed_bytes_max(SEGMENT) + (_framed_bytes_max(n_last) if n_last else 0)


def block_bytes_max(n_raw: int) -> int:
    """The greatest length of a `write_block` of `n_raw` bytes."""
    return _LENGTH.size + framed_bytes_max(n_raw)


def write_segment(levels: Tensor, classes: Tensor, widths: Widths) -> bytes:
    """One segment. `levels`: int32, within 16 bits. `widths`: by class."""
    parts: list[Tensor] = []
    excesses: list[Tensor] = []
    for folded, width in zip(_by_class(levels, classes), widths, strict=True):
        packed, large = kernels.pack_symbols(folded, width)
        parts.append(packed)
        excesses.append(large)
    halves = torch.cat(excesses).view(torch.uint8).view(-1, 2)
    return write_block([*parts, halves[:, 0].contiguous(), halves[:, 1].contiguous()])


def read_segment(payload: Payload, classes: Tensor, widths: Widths) -> Segment:
    """The next segment, with values of these classes.

    Raises `MalformedUpdate` for bytes that `write_segment` does not make, and `LyingLength` for a wrong length.
    """
    n_values, counted = classes.numel(), kernels.count(classes)
    n_each = counted.n_each
    lengths = [packed_bytes(n, width) for n, width in zip(n_each, widths, strict=True)]
    n_packed = sum(lengths)
    data = read_block(payload, range(n_packed, n_packed + 2 * n_values + 1, 2))
    low, high = data[n_packed:].view(2, -1)
    excesses = torch.stack((low, high), dim=1).view(-1).view(torch.int16)
    by_class = torch.empty(n_values, dtype=torch.int16)
    n_used, squares, greatest = 0, 0, 0
    runs = zip(by_class.split(n_each), data[:n_packed].split(lengths), widths, strict=True)
    for folded, packed, width in runs:
        found = kernels.unpack_symbols(folded, packed, width, excesses[n_used:])
        _require_sound(found)
        n_used += found.n_escapes
        squares, greatest = squares + found.folded.sum_of_squares, max(greatest, found.folded.greatest)
    if n_used != excesses.numel():
        raise MalformedUpdate(
            f"the update lists the excesses of {excesses.numel()} values, but {n_used} of its values have one "
            "(docs/reference/wire.md)"
        )
    return Segment(Folded(squares, greatest), by_class, counted)


def write_block(parts: Sequence[Tensor]) -> bytes:
    """A frame of these bytes, after its length. Each part has its own code tables."""
    n_raw = sum(part.numel() for part in parts)
    frame = compress_apart((part.numpy().data for part in parts if part.numel()), n_raw)
    return _LENGTH.pack(len(frame)) + frame


def read_block(payload: Payload, lengths: range) -> Tensor:
    """The bytes of a `write_block`, whose number must be one of `lengths`: uint8."""
    (length,) = _LENGTH.unpack(payload.take(_LENGTH.size).numpy().tobytes())
    if length > (most := framed_bytes_max(lengths[-1])):
        raise LyingLength(f"the compressed frame has {length} bytes; at most {most} are allowed")
    raw = bytearray(decompress_whole(payload.take(length).numpy().data, lengths))
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def best_widths(sample: Iterable[tuple[Tensor, Tensor]]) -> tuple[Widths, int]:
    """The widths that make these segments (levels and classes) shortest, and about how many bytes they take."""
    costs = torch.zeros((N_CLASSES, len(WIDTHS)), dtype=torch.int64)
    for levels, classes in sample:
        for number, folded in enumerate(_by_class(levels, classes)):
            if folded.numel():
                costs[number] += torch.tensor(_costs(folded))
    least = costs.min(1)
    return tuple(WIDTHS[place] for place in least.indices.tolist()), int(least.values.sum())


def entropy_bits(levels: Tensor) -> float:
    """Entropy of the integers' distribution, in bits for each: what an ideal coder of single symbols would need."""
    counts = torch.unique(levels, return_counts=True)[1].to(torch.float64)
    shares = counts / counts.sum()
    return float(-(shares * shares.log2()).sum())


def _by_class(levels: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
    counted = kernels.count(classes)
    folded: tuple[Tensor, ...] = kernels.by_class(levels, counted).split(counted.n_each)
    return folded


def _costs(folded: Tensor) -> list[int]:
    """About how many bytes a class takes, for each width."""
    packed = (kernels.pack_symbols(folded, width) for width in WIDTHS)
    return compressed_bytes(torch.cat((symbols, large.view(torch.uint8))).numpy().data for symbols, large in packed)


def _require_sound(found: Unpacked) -> None:
    if not found.is_within:
        raise MalformedUpdate("the update contains a value that does not fit into 16 bits")
    if not found.is_filled_with_zeros:
        raise MalformedUpdate("the padding after the update's last value is not zero")


def _framed_bytes_max(n_values: int) -> int:
    """The greatest length of a segment: symbols of 8 bits, all values large, and a started byte for each class."""
    return block_bytes_max(3 * n_values + N_CLASSES)
