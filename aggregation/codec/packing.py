"""Integers of a fixed width packed without gaps, in the order that vector units and torch both like.

Groups of 512 values are 32 rows of 16 lanes. Each lane packs its 32 values, the lowest `bits` of each (two's
complement), one after the other from the lowest bit up into `bits` words of 32 bits. Word `w` of the 16 lanes stand
together, little-endian: a group takes 64 * bits bytes. The last group is filled up with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 512
LANES = 16
ROWS = GROUP // LANES
BITS_MAX = 32
_WORD = 0xFFFFFFFF


def packed_bytes(n_values: int, bits: int) -> int:
    """Length of `n_values` packed values."""
    return -(-n_values // GROUP) * GROUP // 8 * bits


def pack(levels: Tensor, bits: int) -> Tensor:
    """int32, one dimension -> uint8, `packed_bytes` of them, on the same device."""
    n_groups = -(-levels.numel() // GROUP)
    rows = torch.nn.functional.pad(levels, (0, n_groups * GROUP - levels.numel())).view(n_groups, ROWS, LANES)
    low = rows.to(torch.int64) & ((1 << bits) - 1)
    out = torch.zeros((n_groups, bits, LANES), dtype=torch.int64, device=levels.device)
    for row in range(ROWS):
        word, shift = divmod(row * bits, 32)
        shifted = low[:, row] << shift
        out[:, word] |= shifted & _WORD
        if shift + bits > 32:
            out[:, word + 1] |= shifted >> 32
    return (out.reshape(-1) & _WORD).to(torch.int64).view(torch.uint8).view(-1, 8)[:, :4].reshape(-1)


def unpack(data: Tensor, n_values: int, bits: int, *, is_signed: bool = True) -> Tensor:
    """The inverse of `pack`: uint8 -> int32. Unsigned values of 32 bits come as their two's complement."""
    n_groups = -(-n_values // GROUP)
    if data.numel() != packed_bytes(n_values, bits):
        raise ValueError(
            f"{n_values} values of {bits} bits take {packed_bytes(n_values, bits)} bytes, not {data.numel()}"
        )
    halves = data.view(-1, 4).to(torch.int64)
    words = halves[:, 0] | halves[:, 1] << 8 | halves[:, 2] << 16 | halves[:, 3] << 24
    words = words.view(n_groups, bits, LANES)
    rows = torch.empty((n_groups, ROWS, LANES), dtype=torch.int64, device=data.device)
    for row in range(ROWS):
        word, shift = divmod(row * bits, 32)
        value = words[:, word] >> shift
        if shift + bits > 32:
            value = value | words[:, word + 1] << (32 - shift)
        rows[:, row] = value & ((1 << bits) - 1)
    values = rows.reshape(-1)[:n_values]
    if is_signed:
        values = values - ((values >> (bits - 1)) << bits)
    return values.to(torch.int32)
