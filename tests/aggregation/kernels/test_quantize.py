"""Integers on a public grid: unbiased to each client, their mean better than chance, the dither taken off exactly."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.aggregation.kernels.arguments import UNIT, Levels, phase
from umbel.aggregation.kernels.philox import dither
from umbel.aggregation.kernels.quantize import Dithers, quantize
from umbel.aggregation.types import LEVEL_MAX

STEPS = st.floats(2.0**-20, 2.0**20, width=32)
EVERY_U = torch.arange(UNIT, dtype=torch.int32)


def gaussian(n_values: int, seed: int) -> torch.Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(seed))


@given(st.floats(-1000, 1000, width=32), STEPS, st.integers(0, 65_535))
def test_over_every_dither_the_mean_is_the_value(value: float, inverse_step: float, phi: int) -> None:
    """Exactly: of a / 2^16, the value in steps rounded to 16 bits of fraction."""
    levels = quantize(torch.full((UNIT,), value), inverse_step, EVERY_U, phi, Levels())
    scaled = Fraction(float(torch.tensor(value) * inverse_step))
    if abs(scaled) < LEVEL_MAX - 1:
        assert int(levels.sum()) == round(scaled * UNIT)
    else:
        assert int(levels.abs().min()) >= LEVEL_MAX - 2


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(0, 65_535), st.integers(1, 15))
def test_levels_stay_within_their_bounds(value: float, phi: int, bits: int) -> None:
    for levels in (Levels(), Levels.of_width(bits)):
        made = quantize(torch.tensor([value]), 1.0, torch.tensor([11], dtype=torch.int32), phi, levels)
        assert levels.low <= int(made) <= levels.high


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, 65_535)), min_size=1, max_size=20),
    st.sampled_from([Levels(), Levels.of_width(4)]),
    st.integers(0, 65_535),
)
def test_what_is_subtracted_is_what_the_dithers_have_added(
    parts: list[tuple[int, int]], levels: Levels, u: int
) -> None:
    mean = Fraction(UNIT - 1, 2)
    expected = -sum(weight * ((u + phi) % UNIT - mean + levels.offset) for weight, phi in parts) / UNIT
    found = Dithers(parts, levels).subtract(torch.zeros(1, dtype=torch.int64), torch.tensor([u], dtype=torch.int32))
    assert float(found) == pytest.approx(float(expected), abs=1e-9)


def test_what_is_subtracted_is_exact_for_the_greatest_weights() -> None:
    """It is rounded once, at the end, so it is the same on every machine."""
    parts = [((1 << 36) - 2 * i - 1, phase(i)) for i in range(4)]
    found = Dithers(parts, Levels()).subtract(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 40_001, 65_535]))
    for u, value in zip((1, 40_001, 65_535), found.tolist(), strict=True):
        assert value == float(-sum(weight * ((u + phi) % UNIT - Fraction(UNIT - 1, 2)) for weight, phi in parts) / UNIT)


@given(st.integers(1, 50), st.integers(1, 1 << 20))
@settings(max_examples=20)
def test_one_client_is_off_by_half_a_step_at_most(index: int, weight: int) -> None:
    values, shared = gaussian(1000, index) * 30, dither(5, 0, 1000)
    levels = quantize(values, 2.0, shared, phase(index), Levels()).to(torch.int64)
    found = Dithers([(weight, phase(index))], Levels()).subtract(weight * levels, shared) / weight / 2
    assert float((found - values).abs().max()) <= 0.2501


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_the_error_of_the_mean_is_that_of_subtractive_dither(correlation: float) -> None:
    """n * NMSE is D^2 / 12, where independent stochastic rounding has twice that (note on compression, 3.6)."""
    n_clients, n_values, step = 64, 20_000, 0.52
    common, shared = gaussian(n_values, 999), dither(5, 0, n_values)
    total, mean = torch.zeros(n_values, dtype=torch.int64), torch.zeros(n_values, dtype=torch.float64)
    for i in range(n_clients):
        values = correlation**0.5 * common + (1 - correlation) ** 0.5 * gaussian(n_values, i)
        total += quantize(values, 1 / step, shared, phase(i), Levels())
        mean += values / n_clients
    found = Dithers([(1, phase(i)) for i in range(n_clients)], Levels()).subtract(total, shared) * step / n_clients
    error = float((found - mean).square().mean()) * n_clients
    assert error == pytest.approx(step**2 / 12, rel=0.05)


def test_clients_that_agree_have_almost_no_error() -> None:
    values, shared, n_clients = gaussian(20_000, 1), dither(5, 0, 20_000), 256
    levels = [quantize(values, 2.0, shared, phase(i), Levels()) for i in range(n_clients)]
    total = torch.stack(levels).to(torch.int64).sum(0)
    found = Dithers([(1, phase(i)) for i in range(n_clients)], Levels()).subtract(total, shared) / 2 / n_clients
    assert float((found - values).square().mean()) * n_clients < 0.001  # of independent rounding: 0.042


# Bits, and the error of a fixed width with subtractive dither and the best cut, scaled to be unbiased: column SDfix.
FIXED = {1: (1.55, 7.98e-1), 2: (2.05, 1.481e-1), 3: (2.35, 4.006e-2), 4: (2.7, 1.179e-2), 6: (3.35, 1.042e-3)}


@pytest.mark.parametrize("bits", FIXED)
def test_a_fixed_width_has_the_error_of_theory(bits: int) -> None:
    cut, theory = FIXED[bits]
    values, shared, levels = gaussian(1 << 19, 1), dither(9, 0, 1 << 19), Levels.of_width(bits)
    step = 2 * cut / (1 << bits)
    made = quantize(values, float(torch.tensor(1 / step)), shared, 0, levels).to(torch.int64)
    found = Dithers([(1, 0)], levels).subtract(made, shared)
    unbiased = found * float(values.double() @ values.double()) / float(values.double() @ found)
    assert float((unbiased - values).square().mean()) == pytest.approx(theory, rel=0.03)
