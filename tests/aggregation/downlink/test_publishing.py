"""What is published follows its master copy: known integers, known steps, and the same ones in any order."""

import math
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.downlink.publishing import STEP_MAX, STEP_MIN, Spread, levels_of, moved, to_move
from umbel.aggregation.model.layout import Layout, TensorSpec


def spec_of(dtype: torch.dtype) -> TensorSpec:
    return Layout.of_state({"w": torch.zeros(1, dtype=dtype)}).tensors[0]


FLOAT = spec_of(torch.float32)


def test_differences_are_rounded_to_the_nearest_step() -> None:
    x = torch.tensor([0.0, 0.124, -0.124, 0.125, -0.125, 0.376, 1e30, -1e30, -0.0])
    assert levels_of(x, 0.25).tolist() == [0, 0, 0, 1, -1, 2, 32_766, -32_766, 0]


def test_what_half_precision_cannot_hold_is_not_to_be_moved() -> None:
    spec, before = spec_of(torch.bfloat16), torch.tensor([1.0, 1.0], dtype=torch.bfloat16)
    assert to_move(spec, torch.tensor([1.003, 1.005]), before).tolist() == [0.0, 2.0**-7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_moved_value_has_the_dtype_of_its_tensor(dtype: torch.dtype) -> None:
    after = moved(spec_of(dtype), torch.tensor([1.0, -2.0, 0.0], dtype=dtype), torch.tensor([3, 0, -1]), 0.125)
    assert after.dtype == dtype
    assert after.tolist() == [1.375, -2.0, -0.125]


def step_of(values: list[float], in_rms: float = 1.0) -> float:
    spread = Spread()
    spread.add(FLOAT, torch.tensor(values), torch.zeros(len(values)))
    return spread.step(in_rms)


def test_the_step_is_made_of_the_first_16_bits() -> None:
    assert step_of([3.0, 4.0]) == torch.tensor(math.sqrt(12.5)).item()
    assert step_of([1 + 2.0**-7]) == 1 + 2.0**-7
    assert step_of([1 + 2.0**-8]) == 1.0


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=1, max_size=50), st.randoms())
def test_the_step_does_not_depend_on_the_order(values: list[float], random: Random) -> None:
    shuffled = sorted(values, key=lambda _: random.random())
    assert step_of(shuffled) == step_of(values)
    rms = max(math.sqrt(math.fsum(value * value for value in values) / len(values)), STEP_MIN)
    assert rms * (1 - 2.0**-7) <= step_of(values) <= rms * (1 + 2.0**-20)


def test_the_step_has_bounds() -> None:
    assert step_of([0.0]) == step_of([1e-40]) == STEP_MIN
    assert step_of([3e38], 2.0) == STEP_MAX
    steps = [step_of([2.0**exponent]) for exponent in range(-110, 110, 10)]
    assert all(before <= after for before, after in pairwise(steps))
