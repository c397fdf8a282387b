"""Counts of clients add up exactly, in any order, however the data are split; those out of bounds are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.counts import (
    COUNT_MAX,
    NUMBERS_MAX,
    RECORD_NAMES_MAX,
    RECORD_NUMBERS_MAX,
    CountsByName,
    most_reported,
    require_counts,
    sum_of_counts,
)

NUMBERS = st.integers(0, COUNT_MAX)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["confusion", "scores", "n"]), st.lists(NUMBERS, min_size=3, max_size=3).map(tuple))
)


@given(rows=ROWS)
def test_each_number_is_the_sum_of_all_clients_that_have_it(rows: list[dict[str, tuple[int, ...]]]) -> None:
    found = sum_of_counts(rows)
    assert found.keys() == {name for row in rows for name in row}
    for name, numbers in found.items():
        for i, number in enumerate(numbers):
            assert number == sum(row[name][i] for row in rows if name in row)


@given(rows=ROWS, cut=st.integers(0, 10), order=st.randoms(use_true_random=False))
def test_sums_of_sums_and_any_order_are_the_same(
    rows: list[dict[str, tuple[int, ...]]], cut: int, order: object
) -> None:
    whole, shuffled = sum_of_counts(rows), rows.copy()
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sum_of_counts(shuffled) == whole
    assert sum_of_counts([sum_of_counts(rows[:cut]), sum_of_counts(rows[cut:])]) == whole


@pytest.mark.parametrize(
    ("lengths", "kept"), [((4, 4, 9), 4), ((9, 4, 4), 4), ((4, 9), 4), ((9, 9, 4), 9), ((2,), 2), ((9, 4, 2), 2)]
)
def test_of_counts_of_different_lengths_the_most_frequent_one_adds_up(lengths: tuple[int, ...], kept: int) -> None:
    found = sum_of_counts([{"confusion": (1,) * length} for length in lengths])
    assert found == {"confusion": (lengths.count(kept),) * kept}


def test_counts_at_their_bounds_are_accepted() -> None:
    require_counts({})
    require_counts({"confusion": (0, COUNT_MAX)})
    require_counts({"scores": (1,) * NUMBERS_MAX})
    require_counts({f"n{i}": (1,) * (NUMBERS_MAX // 64) for i in range(64)})


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ({"n": (-1,)}, "a number of the counts 'n' is -1; it must lie between 0 and 2\\^40"),
        ({"n": (0, COUNT_MAX + 1)}, "must lie between 0 and 2\\^40"),
        ({"n": ()}, "must have 1 to 4096 numbers, not 0"),
        ({"n": (0,) * (NUMBERS_MAX + 1)}, "must have 1 to 4096 numbers, not 4097"),
        ({"a": (0,) * NUMBERS_MAX, "b": (0,)}, "have 4097 numbers together"),
        ({f"n{i}": (0,) for i in range(65)}, "at most 64 names of counts, not 65"),
        ({"no spaces": (0,)}, "metric name"),
        ({"": (0,)}, "metric name"),
    ],
)
def test_counts_out_of_bounds_are_refused(counts: CountsByName, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        require_counts(counts)


def test_names_that_one_client_makes_up_do_not_crowd_out_those_of_many() -> None:
    honest: CountsByName = {"scores": (1, 2)}
    flood: list[CountsByName] = [{f"a{i}-{j}": (1,) for j in range(64)} for i in range(9)]
    found = sum_of_counts([honest, *flood, honest])
    assert len(found) == RECORD_NAMES_MAX
    assert found["scores"] == (2, 4)
    assert list(found) == sorted(found)
    assert most_reported([honest, *flood, honest])[0] == "scores"


def test_a_records_counts_have_a_bounded_number_of_numbers() -> None:
    found = sum_of_counts([{"scores": (1,)}] * 2 + [{f"a{i}": (1,) * NUMBERS_MAX} for i in range(9)])
    assert found["scores"] == (2,)
    assert sum(map(len, found.values())) <= RECORD_NUMBERS_MAX
    assert len(found) == 4
