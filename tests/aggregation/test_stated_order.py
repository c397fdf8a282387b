"""Sums and logarithms of one order of operations: against the order by hand, exact sums, and a library's logarithm."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.stated_order import (
    ceil_log2,
    log2,
    norm,
    norm_of_pieces,
    power,
    square_roots,
    sum_of_squares,
    total,
)

positive = st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False, allow_subnormal=True)


def by_hand(values: list[float]) -> float:
    """The stated order, number by number."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [one + other for one, other in zip(values, values[half:], strict=False)] + values[
            len(values) - half : half
        ]
    return values[0] if values else 0.0


@given(st.lists(st.floats(-1e30, 1e30), max_size=40))
def test_a_total_is_added_in_the_stated_order(values: list[float]) -> None:
    assert float(total(torch.tensor(values, dtype=torch.float64))) == by_hand(values)


@pytest.mark.parametrize("exponent", [-300, -20, 0, 300])
def test_square_roots_are_those_of_ieee_754(exponent: int) -> None:
    drawn = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 10.0**exponent
    assert square_roots(drawn.clone()).tolist() == [math.sqrt(one) for one in drawn.tolist()]


@given(st.integers(0, 300), st.integers(0, 5), st.integers(0, 1000))
def test_rows_are_added_up_each_as_if_alone(n_columns: int, n_rows: int, seed: int) -> None:
    rows = torch.randn(n_rows, n_columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert total(rows.clone()).tolist() == [by_hand(row) for row in rows.tolist()]


@pytest.mark.parametrize("n", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_a_sum_of_squares_is_near_the_exact_one(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).pow_(7)
    exact = math.fsum(one * one for one in values.tolist())  # each square is exact, and so is fsum
    assert sum_of_squares(values) == pytest.approx(exact, rel=1e-14, abs=0)
    assert norm(values) == math.sqrt(sum_of_squares(values))


def test_a_sum_of_squares_is_that_of_rows_of_65536_values() -> None:
    values = torch.randn(150_000, generator=torch.Generator().manual_seed(1))
    rows = [by_hand([one * one for one in row.tolist()]) for row in values.split(1 << 16)]
    assert sum_of_squares(values) == math.fsum(rows)


@given(positive)
def test_a_logarithm_is_near_the_librarys(value: float) -> None:
    assert log2(value) == pytest.approx(math.log2(value), rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("exponent", [-1074, -1022, -1, 0, 1, 10, 1023])
def test_a_power_of_two_has_its_exponent_for_logarithm(exponent: int) -> None:
    value = math.ldexp(1.0, exponent)
    assert log2(value) == ceil_log2(value) == exponent
    assert ceil_log2(math.nextafter(value, math.inf)) == exponent + 1
    assert exponent == -1074 or ceil_log2(math.nextafter(value, 0)) == exponent


@given(positive)
def test_a_ceiling_is_the_least_power_of_two_that_is_no_less(value: float) -> None:
    exponent = ceil_log2(value)
    assert Fraction(2) ** (exponent - 1) < Fraction(value) <= Fraction(2) ** exponent


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_has_no_logarithm_is_refused(value: float) -> None:
    for function in (log2, ceil_log2):
        with pytest.raises(ValueError, match="finite value above zero"):
            function(value)


@given(st.floats(1e-12, 1e12), st.floats(0.0, 16.0))
def test_powers_are_those_of_the_c_library_within_their_bound(base: float, exponent: float) -> None:
    expected = math.pow(base, exponent)
    assert power(base, exponent) == pytest.approx(expected, rel=2.0**-40 * (1.0 + exponent))


@given(st.floats(1e-6, 1e6), st.floats(0.0, 16.0))
def test_a_power_of_one_and_a_zeroth_power_are_exactly_one(base: float, exponent: float) -> None:
    assert power(base, 0.0) == power(1.0, exponent) == 1.0


def test_a_norm_of_pieces_is_that_of_the_vector() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(2))
    assert norm_of_pieces(values.split(70_001)) == pytest.approx(norm(values), rel=1e-15)
    assert norm_of_pieces([]) == 0.0
