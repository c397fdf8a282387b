"""Public random bits: Philox4x32-10, by coordinate, the same on every device and in every version.

A counter-based generator (Salmon, Moraes, Dror and Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011): block
number `i` of a stream is a function of the key, the stream and `i`, so any part of a vector can be made alone. The
numbers of a `torch.Generator` differ between versions and devices.

The 128 bits of a block are assigned to coordinates for vector units of 16 lanes. Within a group, coordinate
`16 * v + lane` takes bits of the group's block number `lane`:

- dither, groups of 128 coordinates: `v` = 0 to 7 takes the halves of the block's four words, the lower half first;
- signs, groups of 2,048 coordinates: `v` = 0 to 127 takes the block's bits, lowest first, word by word; 1 means minus.

Everything is int64 arithmetic in torch: the low 64 bits of a product that wraps are right.
"""

from enum import IntEnum

import torch
from torch import Tensor

LANES = 16
DITHER_GROUP = 128
SIGN_GROUP = 2048
WORDS_A_BLOCK = 4
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Stream(IntEnum):
    """The purpose of the bits: the third word of the counter."""

    DITHER = 1
    SIGNS = 2
    MASK = 3
    FACTOR = 4


def words(
    key: int, stream: int, first_block: int, n_blocks: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words of consecutive blocks: int64, `n_blocks` each, between 0 and 2^32 - 1.

    `key`: 64 bits. The counter is (block mod 2^32, block div 2^32, stream, 0).
    """
    blocks = torch.arange(first_block, first_block + n_blocks, dtype=torch.int64, device=device)
    counter = (blocks & _WORD, blocks >> 32, torch.full_like(blocks, stream), torch.zeros_like(blocks))
    return rounds(counter, (key & _WORD, (key >> 32) & _WORD))


def rounds(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of these counters: figure 3 of Salmon et al., ten times."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def dither(key: int, first: int, n_values: int, device: torch.device | str = "cpu") -> Tensor:
    """The shared dither of the coordinates from `first` on: int32, `n_values`, uniform on 0 to 65,535.

    `first` must be a multiple of `DITHER_GROUP`.
    """
    n_groups = -(-n_values // DITHER_GROUP)
    four = words(key, Stream.DITHER, _first_block(first, DITHER_GROUP), n_groups * LANES, device)
    halves = [half for word in four for half in (word & 0xFFFF, word >> 16)]
    laid_out = torch.stack([half.view(n_groups, LANES) for half in halves], dim=1)
    return laid_out.reshape(-1)[:n_values].to(torch.int32)


def signs(key: int, first: int, n_values: int, device: torch.device | str = "cpu") -> Tensor:
    """Random signs of the coordinates from `first` on: float32, `n_values`, +1 or -1.

    `first` must be a multiple of `SIGN_GROUP`.
    """
    n_groups = -(-n_values // SIGN_GROUP)
    four = words(key, Stream.SIGNS, _first_block(first, SIGN_GROUP), n_groups * LANES, device)
    places = torch.arange(32, dtype=torch.int64, device=device).view(1, 1, 32, 1)
    bits = (torch.stack(four).view(4, n_groups, LANES).transpose(0, 1).unsqueeze(2) >> places) & 1
    return (1 - 2 * bits.reshape(-1)[:n_values]).to(torch.float32)


def words_by_coordinate(
    key: int, stream: Stream, first: int, n_values: int, device: torch.device | str = "cpu"
) -> Tensor:
    """A 32-bit word for each coordinate from `first` on, a multiple of 4: int64, `n_values`.

    Coordinate `j` takes word `j mod 4` of block `j div 4`.
    """
    if first % WORDS_A_BLOCK:
        raise ValueError(f"`first` must be a multiple of {WORDS_A_BLOCK}, not {first}")
    n_blocks = -(-n_values // WORDS_A_BLOCK)
    return torch.stack(words(key, stream, first // WORDS_A_BLOCK, n_blocks, device), dim=1).view(-1)[:n_values]


def uniforms(key: int, first: int, n_values: int, device: torch.device | str = "cpu") -> Tensor:
    """A uniform number for each coordinate from `first` on: float32, multiples of 2^-24 from 0 to below 1.

    It takes the upper 24 bits of the coordinate's word, as many as float32 holds. So P(u < p) is p to 2^-24.
    """
    return (words_by_coordinate(key, Stream.DITHER, first, n_values, device) >> 8).to(torch.float32).mul_(2.0**-24)


def _first_block(first: int, group: int) -> int:
    if first % group:
        raise ValueError(f"`first` must be a multiple of {group}, not {first}")
    return first // group * LANES
