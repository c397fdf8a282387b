"""Rotated vectors as bytes: every level survives, the error is that of the grid, and nothing depends on the padding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.collective.rounding import STEPS, Rounding, packed, unpacked, whole_row

# Of one value of a normal distribution; of 8 bits step^2 / 12, and a little from beyond the grid.
ERRORS = {2: 0.1188, 4: 0.01154, 8: 0.83e-4}


def used(*n_used: int) -> Tensor:
    return torch.tensor(n_used)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_error_is_that_of_the_grid(bits: int) -> None:
    rows = torch.randn(3, 64_000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-6], [1.0], [1e6]])
    rounding = Rounding(bits, feedback=True)
    data = rounding.rounded(rows, used(64_000, 64_000, 64_000))
    assert data.shape == (3, rounding.n_bytes(64_000))
    assert data.dtype == torch.uint8
    errors = (rounding.values(data) - rows).square().sum(1) / rows.square().sum(1)
    torch.testing.assert_close(errors, torch.full((3,), ERRORS[bits]), rtol=0.05, atol=0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_level_survives(bits: int) -> None:
    half = 1 << bits - 1
    levels = torch.arange(-half, half).repeat(whole_row(4 * half) // (2 * half) * 64)[: 64 * 2 * half]
    data = packed(levels.to(torch.int8).unsqueeze(0), bits)
    assert data.shape == (1, len(levels) * bits // 8)
    assert torch.equal(unpacked(data.view(torch.int8), bits)[0], levels.to(torch.int8))


@given(n=st.integers(1, 300), bits=st.sampled_from([4, 8]), seed=st.integers(0, 1000))
def test_without_feedback_the_product_with_the_vector_is_kept(n: int, bits: int, seed: int) -> None:
    """So that the mean over rotations is the vector itself."""
    row = torch.zeros(1, whole_row(n))
    row[0, :n] = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    rounding = Rounding(bits)
    found = rounding.values(rounding.rounded(row, used(n)))[0, :n]
    assert float(found @ row[0, :n]) == pytest.approx(float(row.square().sum()), rel=1e-4)


@given(n=st.integers(1, 300), bits=st.sampled_from([2, 4, 8]), seed=st.integers(0, 1000))
def test_padding_changes_nothing_and_feedback_makes_the_error_least(n: int, bits: int, seed: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    rounding, found = Rounding(bits, feedback=True), list[Tensor]()
    for length in (whole_row(n), whole_row(n) + 256):
        row = torch.zeros(1, length)
        row[0, :n] = values
        found.append(rounding.values(rounding.rounded(row, used(n)))[0, :n])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    left = values - found[0]
    assert abs(float(left @ found[0])) <= 1e-4 * float(values.square().sum())  # at a right angle to what was sent


def test_what_is_not_finite_is_told_by_its_row_alone() -> None:
    rows = torch.ones(3, 64)
    rows[0, 3], rows[1, 5] = math.nan, math.inf
    found = Rounding(4).values(Rounding(4).rounded(rows, used(64, 64, 64)))
    assert found[:2].isnan().all()
    assert found[2].isfinite().all()


def test_zeros_stay_zeros() -> None:
    rounding = Rounding(2, feedback=True)
    assert not rounding.values(rounding.rounded(torch.zeros(2, 64), used(64, 0))).any()


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits must be one of {', '.join(map(str, STEPS))}, not {bits}"):
        Rounding(bits)


def test_two_bits_need_feedback() -> None:
    with pytest.raises(ValueError, match="2 bits need error feedback"):
        Rounding(2)
