"""The tables against the distribution itself, worked out with sixty digits: the distance that they promise is kept."""

from fractions import Fraction
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from umbel.aggregation.privacy import skellam_table
from umbel.aggregation.privacy.skellam_table import (
    UNIT_BITS,
    VARIANCE_MAX,
    VARIANCE_MIN,
    SkellamTable,
    magnitudes,
    table_of,
)

WHOLE = 1 << UNIT_BITS


def weights_of(table: SkellamTable) -> list[int]:
    """The weights that a table was made from, worked out from its cells, with zeros for empty cells."""
    whole, found = 1 << (UNIT_BITS - table.index_bits), [0] * len(table.cuts)
    for cell, (high, low) in enumerate(zip(table.cuts.tolist(), table.low_cuts.tolist(), strict=True)):
        cut = (high << 64) + low
        found[int(table.outcomes[2 * cell + 1])] += cut
        found[int(table.outcomes[2 * cell])] += whole - cut
    return found


def distance(weights: list[int], variance: float) -> float:
    """Between |X| and a table's draws, in total variation, in units of 2^-127."""
    with mpmath.workdps(60):
        scale, mu = mpmath.mpf(WHOLE) * mpmath.exp(-mpmath.mpf(variance)), mpmath.mpf(variance)
        exact = [(2 if k else 1) * scale * mpmath.besseli(k, mu) for k in range(len(weights))]
        beyond = WHOLE - mpmath.fsum(exact)
        inside = mpmath.fsum(abs(one - other) for one, other in zip(exact, weights, strict=True))
        return float((inside + beyond) / 2)


@pytest.mark.parametrize("variance", [VARIANCE_MIN, 0.01, 0.25, 1.0, 9.99, 100.0, 900.0])
def test_a_table_is_as_near_as_it_says(variance: float) -> None:
    weights = magnitudes(variance)
    assert sum(weights) == WHOLE
    assert distance(weights, variance) <= len(weights)


@pytest.mark.parametrize("variance", [1e5, 1e8, VARIANCE_MAX])
def test_large_tables_keep_the_recurrence_to_the_last_unit(variance: float) -> None:
    """I_(k-1) - I_(k+1) = (2k / mu) I_k, each magnitude rounded by half a unit: with the sum, it leaves one solution
    that falls off.
    """
    weights, mu = magnitudes(variance), Fraction(variance)
    for k in [*range(2, len(weights) - 1, 1 + len(weights) // 5000), len(weights) - 2]:
        residue = weights[k - 1] - weights[k + 1] - 2 * k * weights[k] / mu
        assert abs(residue) <= 1 + k / mu, k
    assert abs(2 * weights[0] - weights[2] - 2 * weights[1] / mu) <= len(weights) + 1
    assert len(weights) == pytest.approx(12.6 * variance**0.5, rel=0.05)
    assert len(weights) < 1 << 18  # so that the distance is at most 2^-109


@pytest.mark.parametrize("variance", [1e5, 1e8, VARIANCE_MAX])
def test_large_tables_agree_with_scipy(variance: float) -> None:
    weights = np.array([float(weight) for weight in magnitudes(variance)]) / WHOLE
    k = np.arange(1, len(weights))
    assert weights[0] == pytest.approx(special.ive(0, variance), rel=1e-11)
    some = weights[1:] > 1e-12
    assert np.allclose(weights[1:][some], 2 * special.ive(k, variance)[some], rtol=1e-6, atol=0)  # it is no nearer
    assert float((weights[1:] * k.astype(float) ** 2).sum()) == pytest.approx(variance, rel=1e-12)


@given(st.lists(st.integers(0, WHOLE), min_size=0, max_size=40))
@settings(deadline=None)
def test_a_table_draws_exactly_what_it_was_given(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), WHOLE]
    weights = [above - below for below, above in pairwise(edges)]
    found = weights_of(SkellamTable.of(weights))
    assert found[: len(weights)] == weights
    assert not any(found[len(weights) :])


@pytest.mark.parametrize("variance", [0.01, 50.0, 1e6])
def test_so_does_that_of_a_variance(variance: float) -> None:
    weights = magnitudes(variance)
    assert weights_of(table_of(variance))[: len(weights)] == weights


@pytest.mark.parametrize("variance", [0.0, -1.0, VARIANCE_MIN / 2, VARIANCE_MAX * 1.01, float("nan"), float("inf")])
def test_a_variance_beyond_the_bounds_is_refused(variance: float) -> None:
    with pytest.raises(ValueError, match="variance of a table must lie between"):
        magnitudes(variance)


def test_weights_that_are_no_distribution_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to"):
        SkellamTable.of([WHOLE - 1])


@pytest.mark.parametrize("variance", [VARIANCE_MIN, 0.01, 1.0, 3.7, 100.0, 12_345.6])
def test_it_does_not_matter_where_exactly_the_recurrence_begins(
    variance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's `asinh` decides that, and on another machine it may be one off."""
    found, last = magnitudes(variance), "umbel.aggregation.privacy.skellam_table._last"
    begins = skellam_table._last(variance)  # pyright: ignore[reportPrivateUsage] - what a library decides
    for other in (begins - 1, begins + 1, begins + 3):
        monkeypatch.setattr(last, lambda _variance, other=other: other)
        assert magnitudes(variance) == found
