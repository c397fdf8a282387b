"""Quantiles over clients: a client's own value each, in any order of clients, and the ends with their names."""

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.run.quantiles import NAMES_MAX, Quantiles, quantiles

VALUES = st.lists(st.floats(-1e6, 1e6).map(lambda value: round(value, 3)), min_size=1, max_size=60)


def of(values: Sequence[float]) -> Quantiles:
    return Quantiles.of([(value, f"c{place:03}") for place, value in enumerate(values)])


def empirical(values: Sequence[float], percent: int) -> float:
    """The least of the values that at least this share of all do not exceed, by counting."""
    share = Fraction(percent, 100)
    return min(one for one in values if Fraction(sum(other <= one for other in values), len(values)) >= share)


@given(values=VALUES)
def test_a_quantile_is_the_least_value_that_so_large_a_share_of_the_clients_does_not_exceed(
    values: list[float],
) -> None:
    found = of(values)
    assert (found.p10, found.median, found.p90) == tuple(empirical(values, percent) for percent in (10, 50, 90))
    assert (found.clients, found.least, found.greatest) == (len(values), min(values), max(values))


@given(values=VALUES, data=st.data())
def test_the_order_of_clients_has_no_effect(values: list[float], data: st.DataObject) -> None:
    named = [(value, f"c{place:03}") for place, value in enumerate(values)]
    assert Quantiles.of(data.draw(st.permutations(named))) == Quantiles.of(named)


@pytest.mark.parametrize(
    ("n", "places"), [(1, (1, 1, 1)), (2, (1, 1, 2)), (9, (1, 5, 9)), (10, (1, 5, 9)), (11, (2, 6, 10))]
)
def test_the_places_of_the_quantiles_are_those_of_the_reference(n: int, places: tuple[int, int, int]) -> None:
    found = of([float(place) for place in range(1, n + 1)])
    assert (found.p10, found.median, found.p90) == places


def test_both_ends_are_named_and_of_equal_clients_the_first() -> None:
    found = Quantiles.of([(0.5, "d"), (0.2, "c"), (0.9, "b"), (0.9, "a"), (0.2, "e")])
    assert (found.least_client, found.greatest_client) == ("c", "a")


def test_clients_without_a_metric_do_not_count_for_it() -> None:
    found = quantiles([("a", {"loss": 1.0, "auc": 0.5}), ("b", {}), ("c", {"loss": 3.0})])
    assert list(found) == ["auc", "loss"]
    assert found["auc"] == Quantiles(1, 0.5, "a", 0.5, 0.5, 0.5, 0.5, "a")
    assert found["loss"] == Quantiles(2, 1.0, "a", 1.0, 1.0, 3.0, 3.0, "c")
    assert quantiles([]) == {}


def test_clients_that_make_up_metrics_cannot_make_a_record_grow() -> None:
    liar = ("z", {f"made-up-{number}": 1.0 for number in range(NAMES_MAX)})
    found = quantiles([liar, ("a", {"loss": 0.5}), ("b", {"loss": 0.25})])
    assert len(found) == NAMES_MAX
    assert found["loss"].clients == 2
    assert all(math.isfinite(one.p10) for one in found.values())
