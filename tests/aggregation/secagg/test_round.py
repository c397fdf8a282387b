"""Whole rounds: the sum comes out exactly, whoever drops out when; below the threshold nothing comes out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.aggregation.secagg.federation import Federation
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.errors import TooFew

DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def vector(index: int, n: int, dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(index)
    return torch.randint(info.min, info.max, (n,), dtype=dtype, generator=generator)


def dropouts(n: int) -> st.SearchStrategy[list[int]]:
    """Who is gone, in each of the five phases; so few that the threshold is met."""
    most = n - (2 * n // 3 + 1)
    return st.permutations(range(n)).flatmap(
        lambda order: st.lists(st.integers(0, 4), min_size=most, max_size=most).map(
            lambda phases: [dict(zip(order, phases, strict=False)).get(index, 9) for index in range(n)]
        )
    )


@settings(deadline=None, max_examples=25)
@given(data=st.data(), n=st.integers(3, 12), length=st.integers(1, 300), dtype=st.sampled_from(DTYPES))
def test_the_sum_is_exact_whoever_drops_out(data: st.DataObject, n: int, length: int, dtype: torch.dtype) -> None:
    gone_in = data.draw(dropouts(n))
    federation = Federation.of(n)

    federation.advertise(without=[index for index in range(n) if gone_in[index] == 0])
    # What is lost before the roster lowers n itself, and so the threshold; what is lost later must leave that many.
    federation.share(without=[index for index in range(n) if gone_in[index] == 1])
    federation.hear()
    vectors = {index: vector(index, length, dtype) for index in federation.shared if gone_in[index] > 2}
    total = federation.mask(vectors)
    federation.agree(without=[index for index in vectors if gone_in[index] == 3])
    opened = federation.reveal(without=[index for index in vectors if gone_in[index] == 4])
    opened.masks(Vector.LEVELS).apply(total)

    assert torch.equal(total, sum(vectors.values(), torch.zeros(length, dtype=dtype)))


def test_a_masked_sum_says_nothing_before_it_is_unmasked() -> None:
    federation = Federation.of(4)
    federation.advertise()
    federation.share()
    federation.hear()

    total = federation.mask({index: torch.zeros(4096, dtype=torch.int32) for index in range(4)})

    counts = torch.bincount(total.view(torch.uint8).to(torch.int64), minlength=256).to(torch.float64)
    chi_square = float(((counts - 64) ** 2 / 64).sum())
    assert 150 < chi_square < 380, "16,384 bytes that are uniform: 255 degrees of freedom"


@pytest.mark.parametrize("n_gone", [0, 1, 2, 3])
def test_below_the_threshold_nothing_is_opened(n_gone: int) -> None:
    federation = Federation.of(10)
    federation.advertise()
    federation.share()
    federation.hear()
    federation.mask({index: torch.zeros(8, dtype=torch.int32) for index in range(10)})
    federation.agree()

    federation.reveal(without=range(n_gone))


def test_one_dropout_too_many() -> None:
    federation = Federation.of(10)
    federation.advertise()
    federation.share()
    federation.hear()
    federation.mask({index: torch.zeros(8, dtype=torch.int32) for index in range(10)})
    federation.agree()

    with pytest.raises(TooFew, match="only 6 shares of client-0000's secret were revealed; 7 are needed"):
        federation.reveal(without=range(4))


def test_who_signed_is_not_enough() -> None:
    federation = Federation.of(10)
    federation.advertise()
    federation.share()
    federation.hear()
    federation.mask({index: torch.zeros(8, dtype=torch.int32) for index in range(10)})
    federation.agree(without=range(4))

    with pytest.raises(TooFew, match="only 6 clients that hold this client's shares have signed the sum; 7 are needed"):
        federation.reveal()
