"""The binomial distribution function against exact sums of integers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.run.binomial import at_most


def exact(k: int, n: int, p: float) -> float:
    """The sum in integers, over the common denominator. Sums of fractions would take seconds."""
    yes, whole = p.as_integer_ratio()
    no = whole - yes
    if k < 0 or not no:
        return float(k >= n)
    total = ways = no**n  # of `whole**n`: those with none
    for j in range(min(k, n)):
        ways = ways * (n - j) * yes // ((j + 1) * no)  # leaves no remainder
        total += ways
    return float(total / whole**n)


@given(st.integers(-2, 130), st.integers(0, 128), st.floats(0, 1))
def test_it_is_the_sum_of_the_probabilities(k: int, n: int, p: float) -> None:
    assert float(at_most(k, n, p)) == pytest.approx(exact(k, n, p), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("k", "n", "p"), [(255, 300, 0.85), (950, 1000, 0.97), (9, 1000, 0.001), (999, 1000, 0.999)])
def test_it_holds_in_the_tails(k: int, n: int, p: float) -> None:
    assert float(at_most(k, n, p)) == pytest.approx(exact(k, n, p), rel=1e-9)


def test_a_million_is_no_harder() -> None:
    """Against the normal law, which is good to a few parts in ten thousand there."""
    n, p = 1 << 20, 0.8
    deviation = math.sqrt(n * p * (1 - p))
    for z in (-3.0, 0.0, 2.0):
        k = math.floor(n * p + z * deviation)
        normal = 0.5 * math.erfc(-(k + 0.5 - n * p) / deviation / math.sqrt(2))
        assert float(at_most(k, n, p)) == pytest.approx(normal, abs=5e-4)


def test_arrays_are_broadcast() -> None:
    table = at_most([[1], [2]], 3, [0.0, 0.5, 1.0])
    assert table.shape == (2, 3)
    assert np.allclose(table, [[1, 0.5, 0], [1, 0.875, 0]])
