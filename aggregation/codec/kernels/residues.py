"""Integers modulo 2^m, packed and added up: compiled for tensors on the CPU, Triton or torch for all others, the same
to the bit.

Of a residue the lowest m bits are right, m from 1 to 32, and those are what is packed (`packing.py`). Sums are int32
that wrap, right modulo every 2^m.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.aggregation.codec.kernels.kernels import FOLD_BITS_MAX, check_length, check_types, compiled_for, fold_packed
from umbel.aggregation.codec.kernels.packing import pack, packed_bytes, unpack
from umbel.aggregation.torch_later import torch
from umbel.aggregation.types import RESIDUE_BITS_MAX

if TYPE_CHECKING:
    from torch import Tensor


def pack_residues(residues: Tensor, bits: int) -> Tensor:
    """The lowest `bits`: int8, int16 or int32 (whichever hold them), one dimension -> uint8, `packed_bytes` of them, on
    the same device.
    """
    out = torch.empty(packed_bytes(residues.numel(), bits), dtype=torch.uint8, device=residues.device)
    pack_residues_into(out, residues, bits)
    return out


def pack_residues_into(out: Tensor, residues: Tensor, bits: int) -> None:
    """The same into `out`. Raises `ValueError` for other lengths and widths, `TypeError` for other types."""
    _check_bits(bits)
    check_length(residues, residues.numel())
    check_length(out, packed_bytes(residues.numel(), bits))
    check_types(residues, torch.int8, torch.int16, torch.int32)
    if bits > 8 * residues.element_size():
        raise ValueError(f"{residues.dtype} does not hold {bits} bits; take wider lanes")
    check_types(out, torch.uint8)
    integers = residues.to(torch.int32)
    if kernels := compiled_for(out, integers):
        kernels.pack_integers(out, integers, bits)
    else:
        out.copy_(pack(integers, bits))


def add_packed(sums: Tensor, packed: Tensor, bits: int) -> None:
    """Adds what was packed, modulo 2^32, with the sign that its highest bit says, to `sums`, int32.

    Raises `ValueError` for other lengths and widths, `TypeError` for other types.
    """
    _check_bits(bits)
    check_length(sums, sums.numel())
    check_length(packed, packed_bytes(sums.numel(), bits))
    check_types(sums, torch.int32)
    check_types(packed, torch.uint8)
    if kernels := compiled_for(sums, packed):
        kernels.add_packed(sums, packed, bits)
    elif sums.is_cuda and bits <= FOLD_BITS_MAX:
        fold_packed(sums, packed, bits, 1)
    else:
        sums.add_(unpack(packed, sums.numel(), bits))


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= RESIDUE_BITS_MAX:
        raise ValueError(f"integers are packed in 1 to {RESIDUE_BITS_MAX} bits, not {bits}")
