"""The randomized Hadamard transform in blocks that reach across the whole vector: y = H S x, block by block.

A rotated update looks Gaussian, so a fixed number of bits per coordinate suits any update (Suresh, Yu, Kumar and
McMahan, 2017, section 3). An update that is entropy coded must not be rotated: it would lose the structure that
makes it compressible.

A block is a square of `side` x `side` coordinates. Its rows lie `side` apart equally over the vector, each a run of
`side` neighbours: coordinate

    j = row * (n_blocks * side) + block * side + column

has the position `row * side + column` in its block. So each block has a share of every layer, whose energies differ by
orders of magnitude, and memory is still read in runs of 256 bytes. The rotated vector stays in block order; the inverse
restores the vector's order.

The transform is the plain butterfly (a, b) -> (a + b, a - b) at strides 1, 2, 4, ... in float32, and then the factor
1/side, which is a power of two. Every device adds the same values in the same order, so all implementations agree to
the last bit.
"""

import torch
from torch import Tensor

from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.kernels.philox import SIGN_GROUP, signs
from umbel.aggregation.stated_order import total


def rotate(values: Tensor, blocks: Blocks, key: int) -> Tensor:
    """float32, `n_values` -> float32, `n_padded`, in block order. Keeps the norm."""
    side = blocks.side
    padded = torch.nn.functional.pad(values, (0, blocks.n_padded - blocks.n_values))
    laid = padded.view(side, blocks.n_blocks, side).transpose(0, 1).reshape(-1)
    return butterflies(laid * _signs(blocks, key, values.device), blocks.size).div_(side)


def unrotate(rotated: Tensor, blocks: Blocks, key: int) -> Tensor:
    """The inverse of `rotate`, up to rounding: `n_padded` -> `n_values`. Keeps float32 or float64."""
    side = blocks.side
    laid = butterflies(rotated.clone(), blocks.size).div_(side).mul_(_signs(blocks, key, rotated.device))
    return laid.view(blocks.n_blocks, side, side).transpose(0, 1).reshape(-1)[: blocks.n_values]


def greatest_block_square(values: Tensor, blocks: Blocks) -> float:
    """The greatest sum of squares of a block, before or after rotation. `values`: float32, `n_values`.

    The squares are exact in float64, and added up in a stated order. Takes the same time for any values.
    """
    row = blocks.n_blocks * blocks.side
    squares = torch.zeros(blocks.n_blocks, dtype=torch.float64, device=values.device)
    for part in torch.split(values, row):
        runs = torch.nn.functional.pad(part.to(torch.float64), (0, row - part.numel())).view(
            blocks.n_blocks, blocks.side
        )
        squares += total(runs.square_())
    return float(squares.max())


def butterflies(values: Tensor, size: int) -> Tensor:
    """The Walsh-Hadamard transform, not normalised, of consecutive runs of `size` values. May overwrite `values`."""
    stride = 1
    while stride < size:
        pairs = values.view(-1, 2, stride)
        upper, lower = pairs.select(1, 0), pairs.select(1, 1)
        values = torch.stack((upper + lower, upper - lower), dim=1).view(-1)
        stride *= 2
    return values


def _signs(blocks: Blocks, key: int, device: torch.device) -> Tensor:
    """By position in the rotated vector."""
    n_values = -(-blocks.n_padded // SIGN_GROUP) * SIGN_GROUP
    return signs(key, 0, n_values, device)[: blocks.n_padded]
