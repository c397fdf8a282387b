"""One bit a coordinate, against means taken one by one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, gaussian, heavy, passed, payload_of, relative_error
from umbel.aggregation.codec.vectors.buckets import BUCKET_VALUES
from umbel.aggregation.codec.vectors.sign import Sign


@given(st.integers(1, 9000))
def test_each_side_of_a_bucket_becomes_its_mean(n_values: int) -> None:
    values = heavy(n_values)
    found = passed(Sign(), values, context_of(n_values))
    for bucket, read in zip(values.split(BUCKET_VALUES), found.split(BUCKET_VALUES), strict=True):
        for side in (bucket >= 0, bucket < 0):
            if bool(side.any()):
                torch.testing.assert_close(read[side], bucket[side].mean().expand(int(side.sum())))


def test_the_error_on_gaussian_values_is_that_of_theory() -> None:
    values = gaussian(1 << 18)
    found = passed(Sign(), values, context_of(1 << 18))
    assert relative_error(found, values) == pytest.approx(1 - 2 / math.pi, rel=0.01)


@given(st.integers(1, 9000), st.integers(0, 99))
def test_it_never_moves_away(n_values: int, seed: int) -> None:
    values = heavy(n_values, seed)
    found = passed(Sign(), values, context_of(n_values))
    for bucket, read in zip(values.split(BUCKET_VALUES), found.split(BUCKET_VALUES), strict=True):
        bound = 1 - float(bucket.double().abs().sum() ** 2 / bucket.double().square().sum()) / bucket.numel()
        assert relative_error(read, bucket) <= bound + 1e-6


def test_a_coordinate_takes_a_bit_and_a_little() -> None:
    payload = payload_of(Sign(), gaussian(1 << 18), context_of(1 << 18))
    assert len(payload) * 8 / (1 << 18) == 1 + 64 / BUCKET_VALUES
