"""The order of a client's samples is a permutation that every language can draw from the page alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.sample_order import epoch_seeds, sample_keys, sample_order

_GOLDEN, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
SEEDS = st.integers(0, (1 << 63) - 1)


def mix(word: int) -> int:
    """SplitMix64's output function, in Python's integers."""
    word &= _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def test_the_keys_are_the_stream_of_splitmix64() -> None:
    """The first words from the seed 1234567, as they are published with several implementations."""
    starts = np.full(3, 1234567, dtype=np.uint64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert sample_keys(starts, np.arange(3, dtype=np.uint64)).tolist() == published


@given(SEEDS, st.integers(0, 1000), st.integers(0, 300))
def test_the_order_is_that_of_the_page(seed: int, epoch: int, n: int) -> None:
    start = mix(seed + _GOLDEN * (epoch + 1))
    keys = [(mix(start + _GOLDEN * (i + 1)) >> 32, i) for i in range(n)]
    assert sample_order(seed, epoch, n).tolist() == [i for _, i in sorted(keys)]


def test_the_order_of_one_seed_is_frozen() -> None:
    assert sample_order(42, 0, 10).tolist() == [3, 5, 8, 6, 0, 2, 4, 9, 7, 1]


def test_a_seed_and_a_pass_each_change_the_order() -> None:
    assert len({tuple(sample_order(seed, epoch, 50).tolist()) for seed in range(20) for epoch in range(20)}) == 400


def test_every_place_is_as_likely_for_a_sample() -> None:
    """Of 20,000 orders of 8, chi-square with 49 degrees of freedom: 94.6 has a chance of 1 in 10,000."""
    orders = np.stack([sample_order(seed, 3, 8) for seed in range(20_000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=8) for place in range(8)])
    assert float(((counts - 2500.0) ** 2 / 2500.0).sum()) < 94.6


def test_seeds_of_many_clients_are_those_of_each() -> None:
    seeds, epochs = np.array([5, 5, 9], dtype=np.uint64), np.array([0, 1, 0])
    assert epoch_seeds(seeds, epochs).tolist() == [mix(5 + _GOLDEN), mix(5 + 2 * _GOLDEN), mix(9 + _GOLDEN)]
