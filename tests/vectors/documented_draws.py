"""Seeds, Philox and what is made of its words, and EDEN's points, as the documents have them.

From `docs/reference/codecs.md` and `docs/reference/wire.md`: nothing of umbel's is used.
"""

import hashlib
import math
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Words: TypeAlias = NDArray[np.uint64]
SIGN_STREAM, MASK_STREAM, FACTOR_STREAM = 2, 3, 4
_WORD, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_NORMAL = NormalDist()


def derived_seed(seed: int, *labels: str | int) -> int:
    """codecs.md, "Keys"; `seed.json` says how."""
    text = "\x1f".join(["umbel/seed/1", str(seed), *map(str, labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def philox_blocks(key: int, stream: int, n_blocks: int) -> Words:
    """codecs.md, "Keys"; wire.md, codec 1: the words of blocks 0 on, (`n_blocks`, 4), each below 2^32."""
    blocks = np.arange(n_blocks, dtype=np.uint64)
    c0, c1, c2, c3 = blocks & _WORD, blocks >> _HALF, np.full_like(blocks, stream), np.zeros_like(blocks)
    k0, k1 = key % 2**32, key // 2**32
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _WORD, (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack((c0, c1, c2, c3), axis=1)


def signs(key: int, n_values: int) -> Floats:
    """codecs.md, "The rotation": +1 or -1 for each value, in block order."""
    group, place = np.divmod(np.arange(n_values), 2048)
    v, lane = np.divmod(place, 16)
    words = philox_blocks(key, SIGN_STREAM, 16 * -(-n_values // 2048))
    bits = words[16 * group + lane, v // 32] >> (v % 32).astype(np.uint64) & 1
    return np.where(bits == 1, -1, 1).astype(np.float32)


def chosen_places(key: int, every: int, n_values: int) -> NDArray[np.int64]:
    """codecs.md, "Bytes", the table's `mask`: ascending."""
    runs = np.arange(-(-n_values // every))
    words = philox_blocks(key, MASK_STREAM, -(-len(runs) // 4)).reshape(-1)[: len(runs)]
    places = runs * every + (words * every >> 32).astype(np.int64)
    return places[places < n_values]


def factor(key: int, n_rows: int, rank: int) -> Floats:
    """codecs.md, "The factor": A, (`n_rows`, `rank`)."""
    n = n_rows * rank
    upper = philox_blocks(key, FACTOR_STREAM, -(-n // 4)).reshape(-1)[:n].astype(np.int64) >> 8
    return ((2 * upper + 1 - 2**24) / 2**24).astype(np.float32).reshape(n_rows, rank)


def quantizer_points(bits: int) -> Floats:
    """codecs.md, "The points": by Max's own method (1960). Of a first point above 0 all others follow, and whether it
    was too far out shows at the last.
    """
    low, high = 0.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        if len(_points_after(middle, 1 << (bits - 1))) < 1 << (bits - 1):
            high = middle
        else:
            low = middle
    upper = np.round(np.array(_points_after(low, 1 << (bits - 1))) * 2**20) / 2**20
    return np.concatenate((-upper[::-1], upper)).astype(np.float32)


def _points_after(first: float, n_points: int) -> list[float]:
    """The points above 0 if that is the first, each the mean of what is nearest to it; fewer than `n_points` if one
    would have to lie beyond the mean of all that is left.
    """
    points, edge = list[float](), 0.0
    point = first
    while point <= _mean(edge, math.inf):
        points.append(point)
        if len(points) == n_points:
            break
        edge = _far_edge(edge, point)
        point = 2 * edge - point
    return points


def _far_edge(edge: float, mean: float) -> float:
    """Where what begins at `edge` must end to have that mean."""
    low, high = mean, 40.0  # no mean of what lies beyond 40 is needed
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(edge, middle) < mean else (low, middle)
    return low


def _mean(low: float, high: float) -> float:
    """Of the normal distribution, from `low` to `high`: from its upper tails, which lose nothing far out."""
    tail = math.erfc(low / math.sqrt(2)) / 2 - math.erfc(high / math.sqrt(2)) / 2
    return (_NORMAL.pdf(low) - _NORMAL.pdf(high)) / tail
