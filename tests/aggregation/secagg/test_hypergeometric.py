"""The tail against exact integers: never below the truth, and hardly above it."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.secagg.parameters import ROUNDING, is_within, tail


def exact(n: int, marked: int, drawn: int, above: int) -> Fraction:
    ways = (comb(marked, x) * comb(n - marked, drawn - x) for x in range(max(0, above + 1), min(marked, drawn) + 1))
    return Fraction(sum(ways), comb(n, drawn))


def require_close(n: int, marked: int, drawn: int, above: int) -> None:
    truth, bound = exact(n, marked, drawn, above), Fraction(tail(n, marked, drawn, above))
    assert truth <= bound
    assert bound <= truth * (1 + 2 * Fraction(ROUNDING)) or (bound == 1 and truth > Fraction(1, 20))


@given(st.data())
def test_it_is_the_truth_for_small_counts(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60), "n")
    marked = data.draw(st.integers(0, n), "marked")
    drawn = data.draw(st.integers(0, n), "drawn")
    require_close(n, marked, drawn, data.draw(st.integers(-2, n + 1), "above"))


@pytest.mark.parametrize(
    ("n", "marked", "drawn", "above"),
    [
        (1000, 100, 126, 42),
        (1000, 100, 63, 23),
        (1000, 200, 114, 113),
        (10000, 1000, 160, 54),
        (10000, 1000, 144, 50),
        (10000, 1000, 80, 29),
        (10000, 2000, 2082, 555),
    ],
)
def test_it_is_the_truth_for_the_counts_of_large_rounds(n: int, marked: int, drawn: int, above: int) -> None:
    require_close(n, marked, drawn, above)


def test_what_cannot_be_has_no_chance_and_what_must_be_is_certain() -> None:
    assert tail(10, 3, 5, above=3) == 0.0
    assert tail(10, 3, 5, above=-1) == 1.0
    assert tail(10, 8, 5, above=2) == 1.0  # only two of ten are unmarked


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize(("n", "marked", "drawn", "above"), [(1000, 100, 126, 42), (10000, 1000, 80, 29)])
def test_a_limit_is_kept_exactly_on_both_its_sides(n: int, marked: int, drawn: int, above: int, power: int) -> None:
    """Also where no float64 could tell: a limit that is off by one part in 10^40, or not at all."""
    times = Fraction(n)
    met = times * exact(n, marked, drawn, above) ** power
    for off in (Fraction(1, 10**40), Fraction(1, 10**9), Fraction(1, 10**4), Fraction(1, 2)):
        assert is_within(met * (1 + off), times, n, marked, drawn, above, power)
        assert not is_within(met * (1 - off), times, n, marked, drawn, above, power)
    assert is_within(met, times, n, marked, drawn, above, power)


def test_it_does_not_fade_where_the_first_terms_are_too_small_for_a_float() -> None:
    assert tail(100_000, 50_000, 50_000, above=1) == 1.0
