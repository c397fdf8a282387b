"""The bound on a client's integers: never exceeded where it is the worst case, as seldom as it says where it is not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.kernels.arguments import UNIT, Levels, phase
from umbel.aggregation.kernels.philox import dither
from umbel.aggregation.kernels.quantize import quantize
from umbel.aggregation.privacy.sensitivity import clip_within, l1_bound, rounded_bound


def levels(values: Tensor, shared: Tensor, rank: int = 0) -> Tensor:
    """On a step of 1."""
    return quantize(values, 1.0, shared, phase(rank), Levels()).to(torch.int64)


def published(clip: float, d: int, beta: float) -> float:
    """Kairouz, Liu and Steinke (2021), theorem 1: the norm of a rounded vector, in steps."""
    tail = math.sqrt(2 * math.log(1 / beta)) * (clip + math.sqrt(d) / 2)
    return min(clip + math.sqrt(d), math.sqrt(clip**2 + d / 4 + tail))


@given(st.lists(st.tuples(st.floats(-300, 300), st.integers(0, UNIT - 1)), min_size=1, max_size=50), st.integers(0, 99))
def test_no_dither_takes_an_update_beyond_the_worst_case(pairs: list[tuple[float, int]], rank: int) -> None:
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float32)
    k = levels(values, torch.tensor([shared for _, shared in pairs], dtype=torch.int32), rank)
    norm = float(values.to(torch.float64).norm())
    assert int((k * k).sum()) <= (norm + math.sqrt(len(pairs)) * (1 + 2**-17)) ** 2
    assert int(k.abs().sum()) <= l1_bound(int((k * k).sum()), len(pairs)) * (1 + 1e-12)


@pytest.mark.parametrize("rank", [0, 1, 777, 65_535])
def test_without_data_nothing_is_contributed_whatever_the_dither(rank: int) -> None:
    assert not levels(torch.zeros(UNIT), torch.arange(UNIT, dtype=torch.int32), rank).any()


@pytest.mark.parametrize("beta", [0.3, 0.02])
@pytest.mark.parametrize("value", [0.02, 0.5, 3.5])
def test_with_a_dither_by_chance_the_bound_is_exceeded_as_seldom_as_it_says(value: float, beta: float) -> None:
    n_keys, d = 400, 256
    values = torch.full((d,), value)
    bound = rounded_bound(float(values.norm()), d, beta)
    found = [int(levels(values, dither(key, 0, d), rank=key % 9).square().sum()) for key in range(n_keys)]
    n_beyond = sum(one > bound for one in found)
    assert n_beyond <= n_keys * beta + 3 * math.sqrt(n_keys * beta)
    assert max(found) > 0.4 * bound  # it is no bound that anything keeps


@given(st.floats(1e-3, 1e5), st.integers(1, 10**8), st.floats(1e-9, 1))
def test_it_is_within_the_published_one(clip: float, d: int, beta: float) -> None:
    slack = (1 + 2.0**-17) * clip + math.sqrt(d) * 2.0**-16  # what float32 and fixed point add
    assert rounded_bound(clip, d, beta) <= max(published(slack, d, beta) ** 2 * (1 + 1e-9), 1)


@given(st.floats(1e-3, 1e5), st.integers(1, 10**8))
def test_the_clip_that_a_bound_is_enough_for_is_that_of_which_it_is_the_bound(clip: float, d: int) -> None:
    bound = rounded_bound(clip, d)
    assert clip_within(bound, d, clip) == clip
    assert clip_within(bound, d, 2 * clip) >= clip * (1 - 1e-9)
    assert clip_within(bound, d, clip / 2) == clip / 2, "no more than is asked for"


@given(st.integers(1, 10**12), st.integers(1, 10**8))
def test_it_is_the_greatest(bound: int, d: int) -> None:
    found = clip_within(bound, d)
    if found > 0:
        assert rounded_bound(found, d) <= bound
    if found * 1.001 + 1e-3 > 0:
        assert rounded_bound(found * 1.001 + 1e-3, d) >= bound


def test_a_coarse_step_costs_less_than_a_quarter_for_each_value() -> None:
    d = 10**6
    assert rounded_bound(10.0, d) < 0.1 * published(10.0, d, 2.0**-20) ** 2
    assert rounded_bound(1000.0, d) == pytest.approx(published(1000.0, d, 2.0**-20) ** 2, rel=1e-4)


def test_the_bound_on_magnitudes_is_the_smaller_of_two() -> None:
    assert l1_bound(9, 100) == 9.0  # nine of magnitude 1
    assert l1_bound(400, 4) == 40.0  # four of magnitude 10


@pytest.mark.parametrize(
    ("clip", "d", "beta"), [(0.0, 5, 0.1), (math.nan, 5, 0.1), (math.inf, 5, 0.1), (1.0, 0, 0.1), (1.0, 5, 0.0)]
)
def test_what_has_no_bound_is_refused(clip: float, d: int, beta: float) -> None:
    with pytest.raises(ValueError, match="norm must be finite and above zero"):
        rounded_bound(clip, d, beta)


def test_a_bound_that_numbers_do_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="larger step"):
        rounded_bound(1e8, 10)
