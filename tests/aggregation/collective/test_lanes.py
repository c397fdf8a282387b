"""Words that an all-reduce adds up: their sum holds the exact sum of the ranks' integers, as a modular sum does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.collective.lanes import Lanes


def integers(seed: int, n_values: int, least: int, most: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(least, most + 1, (n_values,), generator=draw, dtype=torch.int64).to(torch.int32)


def summed(lanes: Lanes, vectors: list[Tensor]) -> Tensor:
    """As an all-reduce adds words: wrapping, in any order."""
    total = lanes.zeros()
    for one in reversed(vectors):
        total += lanes.words(torch.split(one, 1000))
    return total


@given(st.integers(0, 3000), st.integers(0, 6), st.integers(1, 32))
@settings(max_examples=200, deadline=None)
def test_sums_that_fit_are_exact_however_large_single_integers_are(n_values: int, n_ranks: int, bits: int) -> None:
    half = 1 << bits - 1
    wanted = integers(0, n_values, -half, half - 1)
    vectors = [integers(1 + rank, n_values, -(1 << 28), 1 << 28) for rank in range(n_ranks)]
    others = sum(vectors, torch.zeros(n_values, dtype=torch.int64))
    lanes = Lanes(n_values, bits)
    last = (wanted - others).clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)
    exact = others + last
    assert torch.equal(lanes.sums(summed(lanes, [*vectors, last])), exact.to(torch.int32))


@pytest.mark.parametrize("bits", [7, 11, 13, 17, 22, 31])
def test_an_overflow_wraps_alone_where_lanes_have_a_bit_to_spare(bits: int) -> None:
    lanes, too_large = Lanes(5000, bits), integers(3, 5000, -(1 << bits), (1 << bits) - 1)
    assert torch.equal(lanes.sums(summed(lanes, [too_large])), lift(too_large, bits))


@pytest.mark.parametrize(
    ("bits", "dtype", "n_bytes"),
    [
        (1, torch.int64, 8 * 16),
        (5, torch.int64, 8 * 84),
        (7, torch.int8, 1000),
        (8, torch.int8, 1000),
        (9, torch.int64, 8 * 143),
        (12, torch.int64, 8 * 200),
        (16, torch.int64, 8 * 250),
        (21, torch.int64, 8 * 334),
        (22, torch.int32, 4000),
        (32, torch.int32, 4000),
    ],
)
def test_a_word_holds_as_many_integers_as_fit(bits: int, dtype: torch.dtype, n_bytes: int) -> None:
    lanes = Lanes(1000, bits)
    assert (lanes.dtype, lanes.n_bytes) == (dtype, n_bytes)
    assert lanes.zeros().dtype == dtype
    assert lanes.zeros().numel() == lanes.n_words


def test_parts_may_end_anywhere() -> None:
    whole, lanes = integers(1, 4097, -100, 100), Lanes(4097, 9)
    assert torch.equal(lanes.words(whole.split(7)), lanes.words([whole]))


def test_what_cannot_be_sent_is_refused() -> None:
    for bits in (0, 33):
        with pytest.raises(ValueError, match=f"between 1 and 32, not {bits}"):
            Lanes(10, bits)
    lanes = Lanes(10, 9)
    with pytest.raises(ValueError, match="must have 10 integers, not more"):
        lanes.words([integers(0, 11, 0, 1)])
    with pytest.raises(ValueError, match="must have 10 integers, not 9"):
        lanes.words([integers(0, 9, 0, 1)])
    with pytest.raises(
        ValueError, match=r"shape \[2\] and type torch\.int64, but has shape \[10\] and type torch\.int32"
    ):
        lanes.sums(integers(0, 10, 0, 1))
