"""A rotated vector as integers, and back from a sum: clipping, parts, rounding errors, refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.aggregation.codec import rotated as module
from umbel.aggregation.codec.rotated import Rotated, dithers_of, sum_of_squares
from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.kernels.rotation import rotate, unrotate
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.sim.bench.codec.bench import vnmse


def rotated(n_values: int, inverse_step: float = 4.0, clip_norm: float | None = None) -> Rotated:
    return Rotated(CodecPlan(Codec.INTEGER, inverse_step, 31, clip_norm), n_values)


def gaussian(n_values: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(seed))


def passed(codec: Rotated, values: torch.Tensor, rank: int = 5) -> torch.Tensor:
    return codec.mean(codec.levels(values, rank), dithers_of([rank]))


@given(st.integers(0, 200_000), st.integers(0, 65_535))
@settings(max_examples=20, deadline=None)
def test_one_vector_comes_back_to_half_a_step(n_values: int, rank: int) -> None:
    """A rotated coordinate is off by D / 2 at most, so the vector by D / 2 times the root of its length."""
    codec, values = rotated(n_values), gaussian(n_values)
    error = float((passed(codec, values, rank) - values).double().norm())
    assert error <= 0.5001 / codec.plan.inverse_step * math.sqrt(codec.n_levels)


def test_the_rotation_and_its_inverse_lose_what_float32_loses() -> None:
    """And the inverse in float32 as much as the rotation: the figures of the module's docstring."""
    values, blocks = gaussian(1 << 18), Blocks.of(1 << 18)
    turned = rotate(values, blocks, 1)
    in_float32, in_float64 = unrotate(turned, blocks, 1), unrotate(turned.double(), blocks, 1)
    assert vnmse(values, in_float32) < 2.5e-14
    assert vnmse(values, in_float64) < 1.2e-14
    assert vnmse(in_float64, in_float32) < 1.2e-14


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0, 1e6])
def test_what_is_longer_than_the_clip_norm_is_shortened(scale: float) -> None:
    values = gaussian(20_000) * scale
    norm = float(values.norm())
    codec = rotated(20_000, 64.0, clip_norm=200.0)
    found = passed(codec, values)
    expected = values * min(1.0, 200.0 / norm)
    assert float((found - expected).abs().max()) < 0.05
    assert float(found.norm()) <= 200.0 + 0.5 / 64 * math.sqrt(codec.n_levels)


def test_the_size_of_the_parts_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = rotated(300_000), gaussian(300_000)
    levels = torch.cat(list(codec.levels(values, 7)))
    mean = codec.mean([levels], dithers_of([7]))
    monkeypatch.setattr(module, "_PART_CPU", 4096)
    small = list(codec.levels(values, 7))
    assert len(small) == -(-codec.n_levels // 4096)
    assert torch.equal(torch.cat(small), levels)
    assert torch.equal(codec.mean(small, dithers_of([7])), mean)


def test_over_many_rounds_the_mean_is_unbiased() -> None:
    values, total = gaussian(2000), torch.zeros(2000, dtype=torch.float64)
    n_keys = 400
    for key in range(n_keys):
        codec = Rotated(CodecPlan(Codec.INTEGER, 1.0, key), 2000)
        total += codec.mean(codec.levels(values, 3), dithers_of([3]))
    off = (total / n_keys - values) / math.sqrt(1 / 12 / n_keys)
    assert float(off.square().mean()) == pytest.approx(1.0, rel=0.15)  # of chance alone


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=50))
def test_squares_are_summed_exactly(values: list[int]) -> None:
    assert sum_of_squares(torch.tensor(values, dtype=torch.int32)) == sum(value**2 for value in values)


def test_what_cannot_be_rounded_is_refused() -> None:
    codec = rotated(1000)
    with pytest.raises(ValueError, match="the plan of an integer codec"):
        Rotated(CodecPlan(), 1000)
    for wrong in (torch.zeros(999), torch.zeros(1000, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"must have shape \[1000\] and type torch\.float32"):
            codec.quantizer(wrong, 0)
    for bad in (math.nan, math.inf, 1e30):
        with pytest.raises(ValueError, match="lower learning rate"):
            codec.quantizer(torch.full((1000,), bad), 0)
    with pytest.raises(ValueError, match="rank must lie between 0 and 65535, not 65536"):
        codec.quantizer(torch.zeros(1000), 65_536)
    with pytest.raises(ValueError, match="a sum must have 1024 integers, not 512"):
        codec.mean([torch.zeros(512, dtype=torch.int32)], dithers_of([0]))
    with pytest.raises(ValueError, match="a sum must have 1024 integers, not 0"):
        codec.mean([], dithers_of([0]))
