"""Entropy coding, value by value: compiled for tensors on the CPU, torch for all others, the same bits.

A *folded* level is the zig-zag of k, or of -k where the value is mirrored: 0, 1, 2, 3 for 0, -1, 1, -2; 16 bits, kept
in int16. A class byte is `classes.py`'s: the class in the lowest five bits, and 128 for mirrored.

Each quarter of a segment is counted separately (the last ones may be shorter), so that four values can be fetched from
their classes at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.aggregation.kernels.kernels import check_first, check_length, check_types, compiled_for
from umbel.aggregation.kernels.native import Folded, Unpacked
from umbel.aggregation.kernels.philox import DITHER_GROUP, dither

N_CLASSES, N_QUARTERS = 32, 4
WIDTHS = (1, 2, 4, 8)
MIRRORED = 128
QUIET = 6  # energies below it have two classes, by the dither
_FOLDED_MAX = 0xFFFF


@dataclass(frozen=True, slots=True)
class Counted:
    """Class bytes and their counts. Made by `count`."""

    classes: Tensor
    counts: Tensor  # of each class in each quarter: int64, 4 x 32

    @property
    def n_each(self) -> list[int]:
        """The number of values of each class."""
        numbers: list[int] = self.counts.sum(0).tolist()
        return numbers

    @property
    def order(self) -> Tensor:
        """The places of the values, class by class."""
        return torch.argsort(self.classes & (N_CLASSES - 1), stable=True)

    @property
    def starts(self) -> Tensor:
        """Where each quarter's values of each class begin in class order: int64, 4 x 32."""
        in_order = self.counts.t().reshape(-1)
        return (in_order.cumsum(0) - in_order).view(N_CLASSES, N_QUARTERS).t().contiguous()


def mix_dither_into(classes: Tensor, key: int, phi: int, first: int) -> None:
    """Turn energies into class bytes, uint8, for the coordinates from `first` on (a multiple of 128)."""
    check_first(first, DITHER_GROUP)
    check_types(classes, torch.uint8)
    if kernels := compiled_for(classes):
        kernels.mix_dither(classes, key, phi, first)
        return
    shared = dither(key, first, classes.numel(), classes.device)
    fraction = (shared + phi) & 0xFFFF
    is_mirrored = fraction >> 15
    is_far = ((fraction ^ -is_mirrored) >> 14) & 1
    classes += (is_far * (classes < QUIET) * (N_CLASSES // 2) + is_mirrored * MIRRORED).to(torch.uint8)


def count(classes: Tensor) -> Counted:
    """Count class bytes, uint8."""
    check_types(classes, torch.uint8)
    counts = torch.empty((N_QUARTERS, N_CLASSES), dtype=torch.int64)
    if kernels := compiled_for(classes):
        kernels.count_classes(counts, classes)
        return Counted(classes, counts)
    length, numbers = -(-classes.numel() // N_QUARTERS), (classes & (N_CLASSES - 1)).to(torch.int64)
    for i, row in enumerate(counts):
        row.copy_(torch.bincount(numbers[i * length : (i + 1) * length], minlength=N_CLASSES))
    return Counted(classes, counts)


def by_class(levels: Tensor, counted: Counted) -> Tensor:
    """int32 levels -> folded levels, class by class, each class in the order of its values."""
    classes = counted.classes
    check_length(levels, classes.numel())
    check_types(levels, torch.int32)
    if kernels := compiled_for(levels, classes):
        folded = torch.empty(levels.numel(), dtype=torch.int16)
        kernels.by_class(folded, levels, classes, counted.starts)
        return folded
    mirrored = torch.where(classes >= MIRRORED, -levels, levels)
    return ((mirrored << 1) ^ (mirrored >> 31))[counted.order].to(torch.int16)


def in_place(folded: Tensor, counted: Counted) -> Tensor:
    """The inverse of `by_class`."""
    classes = counted.classes
    check_length(folded, classes.numel())
    check_types(folded, torch.int16)
    levels = torch.empty(folded.numel(), dtype=torch.int32, device=folded.device)
    if kernels := compiled_for(folded, classes):
        kernels.in_place(levels, folded, classes, counted.starts)
        return levels
    whole = folded.to(torch.int32) & _FOLDED_MAX
    levels[counted.order] = (whole >> 1) ^ -(whole & 1)
    return torch.where(classes >= MIRRORED, -levels, levels)


def pack_symbols(folded: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Folded levels of one class -> symbols of 1, 2, 4 or 8 bits as uint8; and the excesses, int16."""
    check_types(folded, torch.int16)
    n_bytes = packed_bytes(folded.numel(), width)
    if kernels := compiled_for(folded):
        packed = torch.empty(n_bytes, dtype=torch.uint8)
        excesses = torch.empty(folded.numel(), dtype=torch.int16)
        n_escapes = kernels.pack_symbols(packed, excesses, folded, width)
        return packed, excesses[:n_escapes]
    whole, escape = folded.to(torch.int32) & _FOLDED_MAX, (1 << width) - 1
    symbols = whole.clamp(max=escape)
    rows = torch.nn.functional.pad(symbols, (0, n_bytes * 8 // width - symbols.numel())).view(8 // width, n_bytes)
    shifts = torch.arange(0, 8, width, dtype=torch.int32).unsqueeze(1)
    return (rows << shifts).sum(0).to(torch.uint8), (whole - escape)[symbols == escape].to(torch.int16)


def unpack_symbols(folded: Tensor, packed: Tensor, width: int, excesses: Tensor) -> Unpacked:
    """The inverse, into `folded`. Excesses that are asked for and do not come count as 0."""
    check_length(packed, packed_bytes(folded.numel(), width))
    check_types(packed, torch.uint8)
    check_types(folded, torch.int16)
    check_types(excesses, torch.int16)
    if kernels := compiled_for(folded, packed, excesses):
        return kernels.unpack_symbols(folded, packed, width, excesses)
    escape = (1 << width) - 1
    whole = packed.to(torch.int32)
    symbols = torch.cat([(whole >> shift) & escape for shift in range(0, 8, width)])
    symbols, rest = symbols[: folded.numel()], symbols[folded.numel() :]
    is_escape = symbols == escape
    n_escapes = int(is_escape.sum())
    come = excesses[:n_escapes].to(torch.int32) & _FOLDED_MAX
    found = symbols.masked_scatter(is_escape, torch.nn.functional.pad(come, (0, n_escapes - come.numel())) + escape)
    is_within = not bool((found > _FOLDED_MAX).any())
    found &= _FOLDED_MAX
    folded.copy_(found.to(torch.int16))
    sizes = ((found + 1) >> 1).to(torch.int64)
    greatest = int(sizes.max()) if sizes.numel() else 0
    return Unpacked(n_escapes, is_within, not bool(rest.any()), Folded(int(sizes.square().sum()), greatest))


def packed_bytes(n_values: int, width: int) -> int:
    """The length of `n_values` symbols. Raises `ValueError` for a width other than 1, 2, 4 and 8 bits."""
    if width not in WIDTHS:
        raise ValueError(f"a symbol must have 1, 2, 4 or 8 bits, not {width}")
    return -(-n_values * width // 8)
