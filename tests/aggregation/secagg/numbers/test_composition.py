"""Words: no sum of them wraps, and a metric's mean comes out of it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.counts import COUNT_MAX
from umbel.aggregation.secagg.numbers.composition import (
    METRIC_LIMIT,
    N_COUNTS,
    Counts,
    CountSum,
    MeasuredSums,
    Words,
)
from umbel.aggregation.secagg.numbers.metric_sums import MetricSum, MetricSums
from umbel.aggregation.types import COHORT_MAX

COUNTS = Counts(1, 2, 3, 4, 5, 6, 7, 8)
NAMES = st.sampled_from(["confusion", "scores", "a", "z"])


def words_of(clients_max: int = 100, sample_count_max: int = 1 << 20) -> Words:
    return Words(("loss",), ("loss", "accuracy"), 4, clients_max, sample_count_max)


def test_what_is_joined_is_split_again() -> None:
    training = MetricSums({"loss": MetricSum(1, 2, 3)})
    measured = MeasuredSums(training, MetricSums({"loss": MetricSum(), "accuracy": MetricSum(4, 5, -6)}))
    words = words_of()
    exact = torch.tensor([-1, 2, 1 << 62, -(1 << 62)])
    joined = words.join(COUNTS, measured, exact)
    assert joined.shape == (words.n_words,) == (N_COUNTS + 3 * 3 + 4,)
    assert joined.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 0, 0, 0, 4, 5, -6, *exact.tolist()]
    counts, found, rest, counted = words.split(joined)
    assert (counts, found, rest.tolist(), counted) == (COUNTS, measured, exact.tolist(), [])


@given(
    asked=st.dictionaries(NAMES, st.integers(1, 5)),
    held_out=st.dictionaries(NAMES, st.integers(1, 5)),
    data=st.data(),
)
def test_words_of_clients_counts_add_up_to_words_of_their_sums(
    asked: dict[str, int], held_out: dict[str, int], data: st.DataObject
) -> None:
    """A client that lacks counts, or has them in another length, adds zeros."""
    words = replace(words_of(), counts=asked, evaluation_counts=held_out)
    exact, measured = torch.zeros(4, dtype=torch.int64), MeasuredSums(MetricSums(), MetricSums())
    drawn = st.dictionaries(NAMES, st.lists(st.integers(0, COUNT_MAX), min_size=1, max_size=5).map(tuple))
    clients = data.draw(st.lists(st.tuples(drawn, drawn), min_size=1, max_size=5))
    joined = [words.join(COUNTS, measured, exact, words.counted(*client)) for client in clients]
    assert all(one.shape == (words.n_words,) for one in joined)
    trained, tested = words.counts_by_name(words.split(torch.stack(joined).sum(0))[3])
    for found, lengths, rows in (
        (trained, asked, [of_training for of_training, _ in clients]),
        (tested, held_out, [of_held_out for _, of_held_out in clients]),
    ):
        assert found.keys() == lengths.keys()
        for name, length in lengths.items():
            fitting = [row[name] for row in rows if len(row.get(name, ())) == length]
            total = tuple(sum(one[i] for one in fitting) for i in range(length))
            assert found[name] == CountSum(len(fitting), total)


def test_a_number_out_of_bounds_counts_as_the_bound_and_no_sum_wraps() -> None:
    words = replace(words_of(), counts={"n": 3})
    assert words.counted({"n": (-5, COUNT_MAX + 1, 7)}, {}) == [CountSum(1, (0, COUNT_MAX, 7))]
    assert COUNT_MAX * COHORT_MAX < 1 << 63


@pytest.mark.parametrize("words", [torch.zeros(20, dtype=torch.int64), torch.zeros(21, dtype=torch.int32)])
def test_words_of_another_number_or_type_are_refused(words: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"shape \[21\] and type torch\.int64"):
        words_of().split(words)


def test_more_samples_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="lower sample_count_max, or ask fewer clients"):
        words_of(3, 1 << 37)


@given(st.integers(1, 65_536), st.integers(1, 1 << 38), st.floats(allow_nan=False))
def test_no_sum_of_a_metric_wraps_or_is_far_off(clients_max: int, samples: int, value: float) -> None:
    if clients_max * samples > 1 << 38:
        return
    words = words_of(clients_max, samples)
    one, is_cut = words.measured(value, samples)
    assert is_cut == (abs(value) > METRIC_LIMIT)
    assert abs(one.value) * clients_max <= 1 << 62
    cut = min(max(value, -METRIC_LIMIT), METRIC_LIMIT)
    assert words.mean_of(one) == pytest.approx(cut, rel=1e-15, abs=2.0 ** -(words.fraction_bits + 1))
    assert 8 <= words.fraction_bits <= 32


def test_what_is_not_a_number_counts_as_the_greatest_value_and_what_nobody_measured_as_nothing() -> None:
    words = words_of()
    assert words.measured(math.nan, 10) == (words.measured(METRIC_LIMIT, 10)[0], True)
    assert words.measured(None, 10) == (MetricSum(), False)
    assert words.measured(1.0, 0) == (MetricSum(), False)


def test_held_out_samples_count_as_many_as_a_client_may_have_at_most() -> None:
    assert words_of(3, 100).measured(1.0, 1 << 40)[0].samples == 100


@pytest.mark.parametrize(
    ("clients_max", "samples", "bits"),
    [(100, 1 << 20, 19), (1, 1, 32), (1 << 14, 1, 32), (1 << 15, 1, 31), (1 << 10, 1 << 28, 8)],
)
def test_how_fine_a_metric_is_follows_from_how_many_samples_there_can_be(
    clients_max: int, samples: int, bits: int
) -> None:
    assert words_of(clients_max, samples).fraction_bits == bits


def test_one_clients_words_are_in_no_repr() -> None:
    assert "samples" not in repr(MetricSum(1, 2, 3))
    assert "sample_count" not in repr(COUNTS)
    assert "clients" not in repr(CountSum(1, (2, 3)))
