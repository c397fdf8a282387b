"""A uniform number for each coordinate, from Philox (`philox.py`): for rounding up or down by chance, and choosing.

Coordinate `j` is served by word `j mod 4` of block `j div 4`, of which the upper 24 bits are taken: what float32 holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.aggregation.codec.kernels.philox import Stream, words
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

WORDS_A_BLOCK = 4


def words_by_coordinate(
    key: int, stream: Stream, first: int, n_values: int, device: torch.device | str = "cpu"
) -> Tensor:
    """int64, 0 to 2^32 - 1. `first` must be a multiple of 4."""
    if first % WORDS_A_BLOCK:
        raise ValueError(f"coordinate {first} does not begin a block of {WORDS_A_BLOCK}")
    n_blocks = -(-n_values // WORDS_A_BLOCK)
    return torch.stack(words(key, stream, first // WORDS_A_BLOCK, n_blocks, device), dim=1).view(-1)[:n_values]


def uniforms(key: int, first: int, n_values: int, device: torch.device | str = "cpu") -> Tensor:
    """float32, multiples of 2^-24 from 0 on, below 1: so that P(u < p) is p to 2^-24."""
    return (words_by_coordinate(key, Stream.DITHER, first, n_values, device) >> 8).to(torch.float32).mul_(2.0**-24)
