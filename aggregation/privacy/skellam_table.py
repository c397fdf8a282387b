"""The Skellam distribution as a table of exact integers, from which two words and a look-up draw a sample.

Symmetric Skellam noise of variance mu is the difference of two Poisson variables of mean mu / 2:

    P(X = k) = exp(-mu) I_|k|(mu)                                                        (Irwin 1937; Skellam 1946)

with I the modified Bessel function. `magnitudes` computes it in integers of 200 bits and more, by the recurrence
I_(k-1) = I_(k+1) + (2k / mu) I_k, downwards from where it is negligible (Miller's algorithm: every term is positive, so
nothing cancels), and divides by the sum, which is exp(mu). The results are the probabilities of |X|, each rounded to a
whole number of units of 2^-127. They sum to 1 exactly. The sign is one more bit.

`SkellamTable` is Walker's alias method (1977) with Vose's setup (1991), in these units, so it adds no error. The
distance in total variation between its samples and the distribution above is at most

    n * 2^-127,    n: the number of magnitudes, some 12.6 sqrt(mu) for a large mu

because n - 1 of them are off by half a unit at most, zero by the sum of these errors, and each magnitude beyond has a
probability below 2^-128. At the greatest variance that is 2^-109, or 2^-49 over 2^60 samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

VARIANCE_MIN, VARIANCE_MAX = 2.0**-20, 2.0**27
UNIT_BITS = 127  # beside the sign, of the 128 bits of two words
_WORD_BITS = 64
_NEGLIGIBLE = 170 * math.log(2)  # where the recurrence begins: well below a unit
_FIRST = 1 << 192

_Longs: TypeAlias = NDArray[np.int64]
_Ints: TypeAlias = NDArray[np.int32]
_Words: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class SkellamTable:
    """2^`index_bits` cells, equally likely, of two outcomes each: the cell's own number, or its alias.

    A cell gives its own number where the bits after the index are less than its cut, which has 127 - `index_bits` bits.
    The cut's high part (`cuts`) is compared with the first word, the rest (`low_cuts`) with a second word, which is
    needed at most once in 2^45 samples. `outcomes`: alias, own number; alias, own number; ...
    """

    index_bits: int
    cuts: _Longs = field(repr=False)
    low_cuts: _Words = field(repr=False)
    outcomes: _Ints = field(repr=False)

    @classmethod
    def of(cls, weights: Sequence[int]) -> "SkellamTable":
        """A table that draws 0 with probability `weights[0]` * 2^-127, and so on. The weights sum to 2^127."""
        if sum(weights) != 1 << UNIT_BITS:
            raise ValueError("the weights of a table must sum to 2^127")
        index_bits = max(1, (len(weights) - 1).bit_length())
        whole = 1 << (UNIT_BITS - index_bits)
        cuts, aliases = _alias(weights, 1 << index_bits, whole)
        outcomes = np.empty((len(cuts), 2), np.int32)
        outcomes[:, 0], outcomes[:, 1] = aliases, np.arange(len(cuts))
        high = np.array([cut >> _WORD_BITS for cut in cuts], np.int64)
        low = np.array([cut & ((1 << _WORD_BITS) - 1) for cut in cuts], np.uint64)
        return cls(index_bits, high, low, outcomes.reshape(-1))


@lru_cache(maxsize=4)
def table_of(variance: float) -> SkellamTable:
    """The table of |X|. It takes 0.2 s for the greatest variance, a millisecond for a variance of 10,000."""
    return SkellamTable.of(magnitudes(variance))


def magnitudes(variance: float) -> list[int]:
    """The probabilities of |X| = 0, 1, 2, ... in units of 2^-127, up to the last one of half a unit or more.

    Raises `ValueError` for a variance below 2^-20 or above 2^27.
    """
    if not VARIANCE_MIN <= variance <= VARIANCE_MAX:
        raise ValueError(f"the variance of a table must lie between 2^-20 and 2^27, not {variance!r}")
    numerator, denominator = float(variance).as_integer_ratio()
    last = _last(variance)
    terms = [0] * (last + 2)
    terms[last] = _FIRST
    for k in range(last, 0, -1):
        terms[k - 1] = terms[k + 1] + 2 * k * denominator * terms[k] // numerator
    both_signs = terms[0] + 2 * sum(terms[1:])
    weights = [0, *(((term << (UNIT_BITS + 2)) + both_signs) // (2 * both_signs) for term in terms[1:])]
    while not weights[-1]:
        weights.pop()
    weights[0] = (1 << UNIT_BITS) - sum(weights)
    return weights


def _last(variance: float) -> int:
    """The least k with P(X >= k) below 2^-170, by Chernoff: exp(-(k asinh(k / mu) - sqrt(k^2 + mu^2) + mu))."""

    def is_negligible(k: int) -> bool:
        return k * math.asinh(k / variance) - math.hypot(k, variance) + variance > _NEGLIGIBLE

    above = 1
    while not is_negligible(above):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (below, middle) if is_negligible(middle) else (middle, above)
    return above


def _alias(weights: Sequence[int], n_cells: int, whole: int) -> tuple[list[int], list[int]]:
    """For each cell: its own part of `whole`, and the number that has the rest."""
    left = [*weights, *[0] * (n_cells - len(weights))]
    cuts, aliases = [whole] * n_cells, list(range(n_cells))
    poor = [cell for cell in range(n_cells) if left[cell] < whole]
    rich = [cell for cell in range(n_cells) if left[cell] >= whole]
    while poor:
        cell, giver = poor.pop(), rich[-1]
        cuts[cell], aliases[cell] = left[cell], giver
        left[giver] -= whole - left[cell]
        if left[giver] < whole:
            poor.append(rich.pop())
    return cuts, aliases
