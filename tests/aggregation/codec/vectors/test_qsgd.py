"""QSGD's levels: zig-zag planes, the error within the paper's bound, levels beyond s refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, decoded, gaussian, heavy, passed, payload_of, relative_error
from umbel.aggregation.codec.entropy.frame import compress
from umbel.aggregation.codec.vectors.buckets import BUCKET_VALUES
from umbel.aggregation.codec.vectors.qsgd import LEVELS_MAX, Qsgd, zig_zag_read, zig_zag_written
from umbel.aggregation.errors import UpdateOutOfRange


@given(st.lists(st.integers(-LEVELS_MAX, LEVELS_MAX), max_size=40))
def test_levels_are_read_as_they_were_written(levels: list[int]) -> None:
    made = torch.tensor(levels, dtype=torch.int64)
    assert torch.equal(zig_zag_read(zig_zag_written(made, 2), 2), made)


def test_up_to_127_levels_fit_one_plane() -> None:
    levels = torch.arange(-127, 128)
    assert torch.equal(zig_zag_read(zig_zag_written(levels, 1), 1), levels)
    assert (Qsgd(127).n_planes, Qsgd(128).n_planes) == (1, 2)


@given(st.integers(1, LEVELS_MAX), st.integers(1, 5000))
def test_each_value_is_read_as_one_of_the_two_levels_around_it(levels: int, n_values: int) -> None:
    values = heavy(n_values)
    found = passed(Qsgd(levels), values, context_of(n_values))
    for bucket, read in zip(values.split(BUCKET_VALUES), found.split(BUCKET_VALUES), strict=True):
        norm = float(bucket.double().norm())
        assert float((read - bucket).abs().max()) <= norm * (1 / levels + 1e-6)


@pytest.mark.parametrize("levels", [1, 16, 64, 1000])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_error_keeps_the_papers_bound(levels: int, seed: int) -> None:
    for values in (gaussian(1 << 16, seed), heavy(1 << 16, seed)):
        error = relative_error(passed(Qsgd(levels), values, context_of(1 << 16)), values)
        assert error <= min(BUCKET_VALUES / levels**2, math.sqrt(BUCKET_VALUES) / levels)


def test_a_square_root_of_a_bucket_of_levels_takes_few_bits() -> None:
    payload = payload_of(Qsgd(64), gaussian(1 << 18), context_of(1 << 18))
    assert len(payload) * 8 / (1 << 18) < 2.7


def test_a_level_beyond_the_last_is_refused() -> None:
    raw = bytes([0, 0, 128, 63, 2 * 5 + 2])  # a norm of 1, and level 6
    with pytest.raises(UpdateOutOfRange, match="beyond 5"):
        decoded(Qsgd(5), compress([raw], len(raw)), context_of(1))


@pytest.mark.parametrize("levels", [0, LEVELS_MAX + 1])
def test_other_numbers_of_levels_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match="levels"):
        Qsgd(levels)
