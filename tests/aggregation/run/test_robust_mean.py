"""The mean that decides: what liars cannot do to it, and what honest clients get."""

import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.run.stopping import robust_mean
from umbel.aggregation.types import METRIC_ABS_MAX, SAMPLE_COUNT_MAX

WORDS = st.tuples(st.floats(-METRIC_ABS_MAX, METRIC_ABS_MAX), st.integers(1, SAMPLE_COUNT_MAX))
HONEST = st.tuples(st.floats(0.2, 0.8), st.integers(1, 1000))


@given(honest=st.lists(HONEST, min_size=2, max_size=60), lies=st.lists(WORDS, max_size=6), at=st.integers(0, 99))
def test_as_many_liars_as_are_left_out_cannot_move_it_out_of_what_the_others_say(
    honest: list[tuple[float, int]], lies: list[tuple[float, int]], at: int
) -> None:
    while lies and (len(lies) > math.ceil((len(honest) + len(lies)) / 10) or len(honest) + len(lies) < 3):
        lies = lies[1:]
    values = [*honest[: at % len(honest)], *lies, *honest[at % len(honest) :]]
    mean = robust_mean(values)
    said = [value for value, _ in honest]
    assert min(said) <= mean.value <= max(said)


@given(st.lists(WORDS, min_size=1, max_size=80), st.randoms(use_true_random=False))
def test_it_is_finite_and_the_same_in_any_order(values: list[tuple[float, int]], random: object) -> None:
    mean = robust_mean(values)
    assert math.isfinite(mean.value)
    assert mean.n_clients == len(values) > 2 * mean.n_trimmed
    random.shuffle(values)  # type: ignore[attr-defined]  # hypothesis has no public type for it
    assert robust_mean(values) == mean


@given(st.floats(-10, 10), st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_clients_that_agree_are_believed(value: float, counts: list[int]) -> None:
    assert robust_mean([(value, count) for count in counts]).value == value


def test_one_client_of_three_or_of_ten_is_left_out_at_either_end() -> None:
    assert robust_mean([(0.5, 10), (-1e30, 1 << 40), (0.6, 10)]).value == 0.5
    ten = [(n / 10, 10) for n in range(1, 10)] + [(1e30, 1 << 40)]
    mean = robust_mean(ten)
    assert mean.value == pytest.approx(fmean(n / 10 for n in range(2, 10)))
    assert mean.words == "the mean over 8 of 10 clients, without the 1 least and the 1 greatest"
    assert robust_mean(ten * 2).n_trimmed == 2


def test_a_liar_in_the_midst_of_the_others_weighs_no_more_than_most_of_them() -> None:
    values = [(0.1, 100), (0.2, 100), (0.3, 100), (0.4, 1 << 40), (0.5, 100)]
    assert robust_mean(values).value == pytest.approx(0.3)


def test_large_clients_count_for_more_than_small_ones_up_to_the_median() -> None:
    assert robust_mean([(0.0, 1), (1.0, 30), (2.0, 10), (3.0, 90), (9.0, 1)]).value == pytest.approx(
        (30 * 1 + 10 * 2 + 30 * 3) / 70
    )


def test_of_one_or_two_clients_nothing_can_be_left_out() -> None:
    assert robust_mean([(1.0, 30), (2.0, 10)]).value == 1.25
    assert robust_mean([(1.0, 30), (2.0, 10)]).words == "the mean over 2 clients"
    assert robust_mean([(7.0, 3)]).words == "the mean over 1 client"
