"""In which order a client goes through its samples: drawn from a seed, the same on every machine, in every language.

For pass e (from 0) over n samples with a 63-bit seed, all numbers modulo 2^64 and G = 0x9E3779B97F4A7C15:

    s   = mix(seed + G (e + 1))
    h_i = mix(s + G (i + 1))                          for sample i = 0 .. n - 1

and the samples come in ascending order of (h_i >> 32, i). `mix` is the output function of SplitMix64 (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators", with Vigna's constants), so h_0, h_1, ... is the stream of
that generator from s. Of two samples with the same upper half, one pair in 2^32, the first in number is first.

A counter-based draw, unlike one from a generator that must be made for each client, can be made for thousands of
clients at once; the simulator does so, and gets the order in which the SDK trains.
"""

import numpy as np
from numpy.typing import NDArray

SAMPLES_MAX = 1 << 32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
Words = NDArray[np.uint64]


def sample_order(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """A permutation of 0 .. n - 1 for pass `epoch`, counted from 0. Raises `ValueError` for more than 2^32 samples."""
    if not 0 <= n <= SAMPLES_MAX:
        raise ValueError(f"a client can hold at most 2^32 samples, not {n}")
    start = epoch_seeds(np.array([seed], dtype=np.uint64), np.array([epoch]))
    index = np.arange(n, dtype=np.uint64)
    keys = mixed((index + np.uint64(1)) * _GOLDEN + start)
    keys &= ~_LOW
    keys |= index
    keys.sort()
    return (keys & _LOW).view(np.int64)


def epoch_seeds(seeds: Words, epochs: NDArray[np.int64]) -> Words:
    """The s of each seed for the pass beside it: uint64, of the same shape."""
    return mixed(seeds + _GOLDEN * (epochs.astype(np.uint64) + np.uint64(1)))


def sample_keys(starts: Words, indices: Words) -> Words:
    """The h of each sample, where `starts` is its client's s, and `indices` its number: uint64, of the same shape."""
    keys = indices + np.uint64(1)
    keys *= _GOLDEN
    keys += starts
    return mixed(keys)


def mixed(words: Words) -> Words:
    """SplitMix64's output function, of each word, in place."""
    scratch = words >> np.uint64(30)
    words ^= scratch
    words *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(words, np.uint64(27), out=scratch)
    words ^= scratch
    words *= np.uint64(0x94D049BB133111EB)
    np.right_shift(words, np.uint64(31), out=scratch)
    words ^= scratch
    return words
