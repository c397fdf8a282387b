"""Integers of a fixed width packed without gaps, in an order that is fast for vector units and for torch.

Groups of 512 values are 32 rows of 16 lanes. Each lane packs its 32 values, the lowest `bits` of each (two's
complement), one after the other from the lowest bit up, into `bits` words of 32 bits. The words `w` of the 16 lanes are
neighbours, little-endian. A group takes 64 * bits bytes. The last group is padded with zeros.
"""

from functools import lru_cache

import torch
from torch import Tensor

from umbel.aggregation.errors import MalformedUpdate

GROUP = 512
LANES = 16
ROWS = GROUP // LANES


def packed_bytes(n_values: int, bits: int) -> int:
    """Length of `n_values` packed values."""
    return -(-n_values // GROUP) * GROUP // 8 * bits


def pack(levels: Tensor, bits: int) -> Tensor:
    """int32, one dimension -> uint8, `packed_bytes` of them, on the same device."""
    n_groups = -(-levels.numel() // GROUP)
    rows = torch.nn.functional.pad(levels, (0, n_groups * GROUP - levels.numel())).view(n_groups, ROWS, LANES)
    word, shift, _ = _places(bits, levels.device)
    low = rows & ((1 << bits) - 1 if bits < 32 else -1)
    words = torch.zeros((n_groups, bits + 1, LANES), dtype=torch.int32, device=levels.device)
    words.index_add_(1, word, low << shift)  # no two values have a bit of a word in common: to add is to put together
    if bits < 32:
        words.index_add_(1, word + 1, low >> (31 - shift) >> 1)  # in two steps: a shift by 32 is none
    return words[:, :bits].reshape(-1).view(torch.uint8)


def unpack(data: Tensor, n_values: int, bits: int, *, is_signed: bool = True) -> Tensor:
    """The inverse of `pack`: uint8 -> int32. Unsigned values of 32 bits become their two's complement."""
    n_groups = -(-n_values // GROUP)
    if data.numel() != packed_bytes(n_values, bits):
        raise ValueError(
            f"{n_values} values of {bits} bits must take {packed_bytes(n_values, bits)} bytes, not {data.numel()}"
        )
    aligned = data if data.storage_offset() % 4 == 0 else data.clone()
    words = aligned.view(torch.int32).view(n_groups, bits, LANES)
    word, shift, unsigned = _places(bits, data.device)
    values = words.index_select(1, word)
    values >>= shift
    values &= unsigned  # the shift has copied the sign down
    above = words.index_select(1, (word + 1).clamp_(max=bits - 1))
    above <<= 31 - shift
    above <<= 1
    values |= above  # of a value that ends in its word this is the next one's: what follows takes it off
    if is_signed:
        values <<= 32 - bits
        values >>= 32 - bits
    elif bits < 32:
        values &= (1 << bits) - 1
    return values.view(-1)[:n_values]


def unpack_all(data: Tensor, n_values: int, bits: int) -> Tensor:
    """`unpack` for unsigned values of fewer than 32 bits from the network.

    Raises `MalformedUpdate` unless zeros pad the last group, so that values have one spelling.
    """
    whole = unpack(data, -(-n_values // GROUP) * GROUP, bits, is_signed=False)
    if bool(whole[n_values:].any()):
        raise MalformedUpdate("the padding after the last packed value is not zero")
    return whole[:n_values]


@lru_cache(maxsize=64)
def _places(bits: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each row: the word and the bit at which its value begins, and the mask of a word shifted down to that bit."""
    first = torch.arange(ROWS) * bits
    shift = (first % 32).view(ROWS, 1)
    left = ((1 << (32 - shift)) - 1).to(torch.int32)
    return (first // 32).to(device), shift.to(torch.int32).to(device), left.to(device)
