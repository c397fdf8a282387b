"""Uniform numbers by coordinate: any part alone, between 0 and 1, evenly; and buckets beside them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.codec.kernels.philox import Stream, words
from umbel.aggregation.codec.vectors.uniform import uniforms, words_by_coordinate


@given(st.integers(0, 500).map(lambda i: 4 * i), st.integers(0, 500), st.integers(0, (1 << 63) - 1))
def test_a_part_is_the_part_of_the_whole(first: int, n_values: int, key: int) -> None:
    assert torch.equal(uniforms(key, first, n_values), uniforms(key, 0, first + n_values)[first:])


def test_a_coordinate_has_its_word() -> None:
    four = words(3, Stream.MASK, 0, 5)
    found = words_by_coordinate(3, Stream.MASK, 0, 18)
    assert found.tolist() == [int(four[j % 4][j // 4]) for j in range(18)]


def test_they_are_even_between_0_and_1() -> None:
    found = uniforms(1, 0, 1 << 20).double()
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    assert float(found.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / (1 << 20)) ** 0.5)
    assert float(found.var()) == pytest.approx(1 / 12, rel=0.01)


def test_a_part_must_begin_a_block() -> None:
    with pytest.raises(ValueError, match="coordinate 3"):
        uniforms(1, 3, 5)
