"""Launches the kernels for tensors on CUDA (`triton_kernels.py`): the functions of `native.Kernels`, by Triton.

Nothing here checks arguments; codecs call `kernels.py`, which does. Importing this imports Triton, which comes with
torch for CUDA.
"""

from typing import Any

import torch
from torch import Tensor

from umbel.aggregation.kernels import triton_kernels
from umbel.aggregation.kernels.arguments import Blocks, Quantizer
from umbel.aggregation.kernels.native import Folded

TILE = 4096  # positions that one program makes
_kernels: Any = triton_kernels  # Triton's types are not Python's


class TritonKernels:
    """The functions of `native.Kernels`, for contiguous tensors on one CUDA device; packed ones begin a 32-bit word."""

    def rotate(self, out: Tensor, values: Tensor, blocks: Blocks, key: int, first: int) -> None:
        shape = (blocks.n_values, blocks.n_blocks, first, out.numel())
        with torch.cuda.device_of(out):
            _kernels.rotate[_grid(out.numel())](out, values, *shape, *_halves(key), SIDE=blocks.side)

    def unrotate(self, out: Tensor, rotated: Tensor, blocks: Blocks, key: int, first: int) -> None:
        shape = (blocks.n_values, blocks.n_blocks, first, rotated.numel())
        with torch.cuda.device_of(out):
            _kernels.unrotate[_grid(rotated.numel())](out, rotated, *shape, *_halves(key), SIDE=blocks.side)

    def signs(self, out: Tensor, key: int, first: int) -> None:
        with torch.cuda.device_of(out):
            _kernels.write_signs[_grid(out.numel())](out, first, out.numel(), *_halves(key))

    def dither(self, out: Tensor, key: int, first: int) -> None:
        with torch.cuda.device_of(out):
            _kernels.write_dither[_grid(out.numel())](out, first, out.numel(), *_halves(key))

    def quantize(self, out: Tensor, values: Tensor, quantizer: Quantizer, first: int) -> None:
        with torch.cuda.device_of(out):
            _kernels.quantize[_grid(out.numel())](out, values, first, out.numel(), *_arguments(quantizer))

    def pack(self, out: Tensor, values: Tensor, quantizer: Quantizer, bits: int, first: int) -> None:
        n_values, words = values.numel(), out.view(torch.int32)
        with torch.cuda.device_of(out):
            _kernels.pack[_grid(n_values)](words, values, first, n_values, *_arguments(quantizer), BITS=bits)

    def rotate_and_pack(
        self,
        out: Tensor,
        values: Tensor,
        blocks: Blocks,
        sign_key: int,
        quantizer: Quantizer,
        bits: int,
        part: tuple[int, int],
    ) -> None:
        shape, keys = (blocks.n_values, blocks.n_blocks, *part), _halves(sign_key)
        words, options = out.view(torch.int32), {"SIDE": blocks.side, "BITS": bits}
        with torch.cuda.device_of(out):
            _kernels.rotate_and_pack[_grid(part[1])](words, values, *shape, *keys, *_arguments(quantizer), **options)

    def fold(self, sums: Tensor, data: Tensor, bits: int, weight: int) -> Folded:
        n_values, grid = sums.numel(), _grid(sums.numel())
        squares = torch.zeros(grid[0], dtype=torch.int64, device=sums.device)
        greatest = torch.zeros(grid[0], dtype=torch.int32, device=sums.device)
        with torch.cuda.device_of(sums):
            _kernels.fold[grid](sums, data.view(torch.int32), n_values, weight, squares, greatest, BITS=bits)
        return Folded(int(squares.sum()), int(greatest.max())) if n_values else Folded(0, 0)


def _grid(n_positions: int) -> tuple[int]:
    return (-(-n_positions // TILE),)


def _halves(key: int) -> tuple[int, int]:
    """As signed 32-bit integers: Triton compiles anew for other types of integers."""
    return _signed(key & 0xFFFFFFFF), _signed(key >> 32)


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


def _arguments(quantizer: Quantizer) -> tuple[float, int, int, int, int, int, int]:
    levels = quantizer.levels
    return quantizer.inverse_step, *_halves(quantizer.key), quantizer.phi, levels.low, levels.high, levels.offset
