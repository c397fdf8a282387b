"""Arithmetic on whole vectors: compiled for tensors on the CPU, Triton for CUDA, torch for all others.

All of them give the same integers and the same floats to the last bit. The functions work on parts of a vector, into
the caller's buffers, so a vector of any length needs no memory beside itself. Parts may be computed in threads. A part
of a rotated vector begins at a multiple of `TILE`.

Of a *residue* the lowest m bits are right, with m from 1 to 32, and only these are packed (`packing.py`). Sums of
residues are int32, which wraps, so they are right modulo every 2^m.
"""

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from umbel.aggregation.kernels.arguments import UNIT, Blocks, Quantizer
from umbel.aggregation.kernels.native import Folded, Kernels, chosen, is_torch_forced
from umbel.aggregation.kernels.packing import GROUP, pack, packed_bytes, unpack
from umbel.aggregation.kernels.philox import DITHER_GROUP, SIGN_GROUP, dither, signs
from umbel.aggregation.kernels.quantize import quantize
from umbel.aggregation.kernels.rotation import butterflies
from umbel.aggregation.types import RESIDUE_BITS_MAX

if TYPE_CHECKING:
    from umbel.aggregation.kernels.cuda import TritonKernels  # Triton is there only with torch for CUDA

log = logging.getLogger("umbel.aggregation")
TILE = 4096  # positions: the largest block, and a whole number of every smaller block and group
FOLD_BITS_MAX = 15  # of levels whose squares are added up, and of all that Triton packs
_INT32 = 1 << 31


def rotate_into(out: Tensor, values: Tensor, blocks: Blocks, key: int, first: int = 0) -> None:
    """Fill `out` with the rotated vector from position `first` on: whole blocks. Both float32."""
    _check_vector(values, blocks)
    _check_part(first, out.numel(), blocks)
    check_types(out, torch.float32)
    check_types(values, torch.float32)
    if kernels := _native(out, values):
        kernels.rotate(out, values, blocks, key, first)
    else:
        out.copy_(_rotated(values, blocks, key, first, out.numel()))


def unrotate_into(out: Tensor, rotated: Tensor, blocks: Blocks, key: int, first: int = 0) -> None:
    """The inverse of `rotate_into`, up to rounding. Both float32 or both float64.

    `rotated`: the rotated vector from position `first` on, whole blocks. `out`: the whole vector, of which the
    coordinates of these blocks are written.
    """
    _check_vector(out, blocks)
    _check_part(first, rotated.numel(), blocks)
    check_types(out, torch.float32, torch.float64)
    check_types(rotated, out.dtype)
    if kernels := _native(out, rotated):
        kernels.unrotate(out, rotated, blocks, key, first)
        return
    laid = butterflies(rotated.clone(), blocks.size).div_(blocks.side)
    laid.mul_(signs(key, first, rotated.numel(), rotated.device))
    for row, places in enumerate(_runs(blocks, first, rotated.numel())):
        run = out[places]
        run.copy_(laid.view(-1, blocks.side, blocks.side)[:, row].reshape(-1)[: run.numel()])


def quantize_into(out: Tensor, values: Tensor, quantizer: Quantizer, first: int = 0) -> None:
    """The levels of the coordinates from `first` on (a multiple of 128): float32 -> int32 or int16."""
    check_first(first, DITHER_GROUP)
    check_length(out, values.numel())
    check_types(out, torch.int32, torch.int16)
    check_types(values, torch.float32)
    kernels = _native(out, values)
    if kernels and _fits(quantizer):
        kernels.quantize(out, values, quantizer, first)
    else:
        out.copy_(_quantized(values, quantizer, first))


def pack_into(out: Tensor, values: Tensor, quantizer: Quantizer, bits: int, first: int = 0) -> None:
    """`quantize_into`, then pack the lowest `bits` (1 to 32). `first`: a multiple of 512. float32 -> uint8."""
    _check_bits(bits, RESIDUE_BITS_MAX)
    check_first(first, GROUP)
    check_length(out, packed_bytes(values.numel(), bits))
    check_types(out, torch.uint8)
    check_types(values, torch.float32)
    kernels = _packing(bits, out, values)
    if kernels and _fits(quantizer):
        kernels.pack(out, values, quantizer, bits, first)
    else:
        out.copy_(pack(_quantized(values, quantizer, first), bits))


def rotate_and_pack_into(
    out: Tensor,
    values: Tensor,
    blocks: Blocks,
    sign_key: int,
    quantizer: Quantizer,
    bits: int,
    part: tuple[int, int] | None = None,
) -> None:
    """`rotate_into`, then `pack_into`, without writing the rotated vector.

    `part`: the first position and the number of positions (whole blocks); None for all.
    """
    first, n_positions = part or (0, blocks.n_padded)
    _check_bits(bits, RESIDUE_BITS_MAX)
    _check_vector(values, blocks)
    _check_part(first, n_positions, blocks)
    check_length(out, packed_bytes(n_positions, bits))
    check_types(out, torch.uint8)
    check_types(values, torch.float32)
    kernels = _packing(bits, out, values)
    if kernels and _fits(quantizer):
        kernels.rotate_and_pack(out, values, blocks, sign_key, quantizer, bits, (first, n_positions))
    else:
        rotated = _rotated(values, blocks, sign_key, first, n_positions)
        out.copy_(pack(_quantized(rotated, quantizer, first), bits))


def fold_packed(sums: Tensor, data: Tensor, bits: int, weight: int) -> Folded:
    """Add weight * level, of 1 to 15 bits, to `sums`, int32 or int64. The caller ensures that they do not overflow."""
    _check_bits(bits, FOLD_BITS_MAX)
    check_length(data, packed_bytes(sums.numel(), bits))
    check_types(sums, torch.int32, torch.int64)
    check_types(data, torch.uint8)
    kernels = _native(sums, data)
    if kernels and -_INT32 <= weight < _INT32:
        return kernels.fold(sums, data, bits, weight)
    levels = unpack(data, sums.numel(), bits).to(torch.int64)
    sums.add_((levels * weight).to(sums.dtype))
    if not levels.numel():
        return Folded(0, 0)
    return Folded(int(levels.square().sum()), int(levels.abs().max()))


def add_levels(sums: Tensor, levels: Tensor, weight: int) -> None:
    """Add weight * level, int32 or int64, to `sums`, int64. The caller ensures that they do not overflow."""
    check_length(levels, sums.numel())
    check_types(sums, torch.int64)
    check_types(levels, torch.int32, torch.int64)
    kernels = compiled_for(sums, levels)
    if kernels and levels.dtype == torch.int32 and -_INT32 <= weight < _INT32:
        kernels.add_levels(sums, levels, weight)
    else:
        sums.add_(levels, alpha=weight)


def pack_residues(residues: Tensor, bits: int) -> Tensor:
    """The lowest `bits` of residues, packed on the same device: int8, int16 or int32 -> uint8."""
    out = torch.empty(packed_bytes(residues.numel(), bits), dtype=torch.uint8, device=residues.device)
    pack_residues_into(out, residues, bits)
    return out


def pack_residues_into(out: Tensor, residues: Tensor, bits: int) -> None:
    """`pack_residues` into `out`. Raises `ValueError` for other lengths and widths, `TypeError` for other types."""
    _check_bits(bits, RESIDUE_BITS_MAX)
    check_length(residues, residues.numel())
    check_length(out, packed_bytes(residues.numel(), bits))
    check_types(residues, torch.int8, torch.int16, torch.int32)
    if bits > 8 * residues.element_size():
        raise ValueError(f"{residues.dtype} is too narrow for {bits} bits; use a wider type")
    check_types(out, torch.uint8)
    integers = residues.to(torch.int32)
    if kernels := compiled_for(out, integers):
        kernels.pack_integers(out, integers, bits)
    else:
        out.copy_(pack(integers, bits))


def add_packed(sums: Tensor, packed: Tensor, bits: int) -> None:
    """Add packed residues, sign-extended from their highest bit, to `sums`: int32, which wraps at 2^32.

    Raises `ValueError` for other lengths and widths, `TypeError` for other types.
    """
    _check_bits(bits, RESIDUE_BITS_MAX)
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


def dither_into(out: Tensor, key: int, first: int) -> None:
    """The shared dither of the coordinates from `first` on (a multiple of 128): int32."""
    check_first(first, DITHER_GROUP)
    check_types(out, torch.int32)
    if kernels := _native(out):
        kernels.dither(out, key, first)
    else:
        out.copy_(dither(key, first, out.numel(), out.device))


def signs_into(out: Tensor, key: int, first: int) -> None:
    """Random signs of the coordinates from `first` on (a multiple of 2,048): float32."""
    check_first(first, SIGN_GROUP)
    check_types(out, torch.float32)
    if kernels := _native(out):
        kernels.signs(out, key, first)
    else:
        out.copy_(signs(key, first, out.numel(), out.device))


def compiled_for(*tensors: Tensor) -> Kernels | None:
    """The compiled kernels, if they can take these tensors."""
    if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
        return chosen()
    return None


def _native(*tensors: Tensor) -> "Kernels | TritonKernels | None":
    """The kernels that can take these tensors, if any."""
    device = tensors[0].device
    if device.type != "cuda":
        return compiled_for(*tensors)
    is_whole = all(one.device == device and one.is_contiguous() and _begins_a_word(one) for one in tensors)
    return _triton() if is_whole else None


def _packing(bits: int, *tensors: Tensor) -> "Kernels | TritonKernels | None":
    """The kernels that can take these tensors and pack levels of this width, if any."""
    return _native(*tensors) if bits <= FOLD_BITS_MAX else compiled_for(*tensors)


@cache
def _triton() -> "TritonKernels | None":
    """The kernels for CUDA, if Triton is installed and a first kernel works. Otherwise one log line says why not."""
    if is_torch_forced():
        return None
    try:
        from umbel.aggregation.kernels.cuda import TritonKernels

        kernels, tried = TritonKernels(), torch.zeros(1, dtype=torch.int32, device="cuda")
        kernels.dither(tried, 0, 0)
        if not torch.equal(tried, dither(0, 0, 1, "cuda")):
            raise RuntimeError("the first result was wrong")
    except Exception as error:  # of a compiler, a driver or a missing library: torch computes the same
        log.warning(
            "the Triton kernels do not work here (%s); torch computes the same results on the GPU, more slowly", error
        )
        return None
    return kernels


def _begins_a_word(tensor: Tensor) -> bool:
    return tensor.element_size() > 1 or tensor.data_ptr() % 4 == 0


def _rotated(values: Tensor, blocks: Blocks, key: int, first: int, n_positions: int) -> Tensor:
    """`rotation.rotate`, for these positions only."""
    side = blocks.side
    laid = values.new_zeros((n_positions // blocks.size, side, side))
    for row, places in enumerate(_runs(blocks, first, n_positions)):
        run = values[places]
        padded = torch.nn.functional.pad(run, (0, n_positions // side - run.numel()))
        laid[:, row] = padded.view(-1, side)
    signed = laid.view(-1) * signs(key, first, n_positions, values.device)
    return butterflies(signed, blocks.size).div_(side)


def _runs(blocks: Blocks, first: int, n_positions: int) -> list[slice]:
    """For each row of a block, its coordinates in the blocks of these positions. Slices may reach past the end."""
    starts = (row * blocks.n_blocks * blocks.side + first // blocks.side for row in range(blocks.side))
    return [slice(start, start + n_positions // blocks.side) for start in starts]


def _quantized(values: Tensor, quantizer: Quantizer, first: int) -> Tensor:
    shared = dither(quantizer.key, first, values.numel(), values.device)
    return quantize(values, quantizer.inverse_step, shared, quantizer.phi, quantizer.levels)


def _fits(quantizer: Quantizer) -> bool:
    """Whether all arithmetic with this quantizer fits 32 bits."""
    levels = quantizer.levels
    return 0 <= quantizer.phi < UNIT and abs(levels.offset) <= UNIT and -_INT32 <= levels.low <= levels.high < _INT32


def _check_bits(bits: int, greatest: int) -> None:
    if not 1 <= bits <= greatest:
        raise ValueError(f"bits must lie between 1 and {greatest}, not {bits}")


def _check_vector(values: Tensor, blocks: Blocks) -> None:
    check_length(values, blocks.n_values)
    if blocks.n_padded < blocks.n_values or blocks.side not in (4, 8, 16, 32, 64):
        raise ValueError(f"{blocks} cannot hold the vector; make the blocks with Blocks.of")


def _check_part(first: int, n_positions: int, blocks: Blocks) -> None:
    check_first(first, TILE)
    if n_positions % blocks.size or not 0 <= n_positions <= blocks.n_padded - first:
        raise ValueError(f"{n_positions} positions from {first} on are not whole blocks of {blocks}")


def check_first(first: int, group: int) -> None:
    if first < 0 or first % group:
        raise ValueError(f"`first` must be a multiple of {group} and at least 0, not {first}")


def check_length(tensor: Tensor, length: int) -> None:
    if tensor.dim() != 1 or tensor.numel() != length:
        raise ValueError(f"the vector must have shape [{length}], not {list(tensor.shape)}")


def check_types(tensor: Tensor, *types: torch.dtype) -> None:
    if tensor.dtype not in types:
        raise TypeError(f"the vector's type must be {' or '.join(map(str, types))}, not {tensor.dtype}")
