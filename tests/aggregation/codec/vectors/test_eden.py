"""EDEN against its theory: the error of the Lloyd-Max quantizer, unbiased; clients' errors average out."""

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.aggregation.codec.cases import (
    context_of,
    gaussian,
    heavy,
    passed,
    payload_of,
    relative_error,
    standard_errors,
)
from umbel.aggregation.codec.vectors.codec import CodecContext
from umbel.aggregation.codec.vectors.eden import POINT_UNITS, Eden, lloyd_max, upper_points
from umbel.aggregation.model.layout import Layout, TensorSpec

# By bits: D / (1 - D) of the Lloyd-Max quantizer (note on compression, column EDEN-unb).
THEORY = {1: 5.708e-1, 2: 1.331e-1, 3: 3.578e-2, 4: 9.592e-3, 5: 2.511e-3, 6: 6.447e-4, 7: 1.635e-4, 8: 4.119e-5}


@pytest.mark.parametrize("bits", THEORY)
def test_the_error_on_gaussian_values_is_that_of_theory(bits: int) -> None:
    """Over 2^21 values: at 8 bits a percent of the error lies in the few values of the two outermost cells."""
    made = [(gaussian(1 << 18, key), context_of(1 << 18, key)) for key in range(8)]
    errors = [relative_error(passed(Eden(bits), values, context), values) for values, context in made]
    assert sum(errors) / len(errors) == pytest.approx(THEORY[bits], rel=0.01)


@pytest.mark.parametrize("bits", [1, 4])
def test_the_error_does_not_depend_on_what_is_encoded(bits: int) -> None:
    values = heavy(1 << 17)
    assert relative_error(passed(Eden(bits), values, context_of(1 << 17)), values) == pytest.approx(
        THEORY[bits], rel=0.02
    )


@pytest.mark.parametrize("bits", THEORY)
def test_points_are_the_means_of_what_is_nearest_to_them(bits: int) -> None:
    """By brute force: a sum over a fine grid of the normal density."""
    points = torch.tensor(lloyd_max(bits), dtype=torch.float64)
    assert torch.equal(points, -points.flip(0))
    x = torch.linspace(-9, 9, 1_800_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    nearest = torch.bucketize(x, (points[1:] + points[:-1]) / 2)
    mass = torch.zeros_like(points).index_add_(0, nearest, density)
    mean = torch.zeros_like(points).index_add_(0, nearest, density * x) / mass
    torch.testing.assert_close(mean, points, rtol=0, atol=5e-5)


@pytest.mark.parametrize("bits", THEORY)
def test_no_point_lies_near_where_its_rounding_changes(bits: int) -> None:
    """Libraries differ by 1e-12 in the points; other readers may be off by 1e-9 (docs/reference/codecs.md)."""
    in_units = upper_points(bits) * POINT_UNITS
    assert np.abs(in_units - np.floor(in_units) - 0.5).min() > 1e-9 * POINT_UNITS


def test_the_points_are_the_same_on_every_machine() -> None:
    units = [round(point * (1 << 20)) for bits in range(1, 9) for point in lloyd_max(bits)]
    assert hashlib.sha256(repr(units).encode()).hexdigest()[:16] == "436eeb887ddf94ca"


def test_the_points_of_two_bits_are_those_of_the_literature() -> None:
    """Max (1960), table I: 0.4528 and 1.510."""
    assert lloyd_max(2) == pytest.approx((-1.510, -0.4528, 0.4528, 1.510), abs=5e-4)


@pytest.mark.parametrize(("bits", "make"), [(1, gaussian), (4, gaussian), (4, heavy)])
def test_the_mean_over_many_keys_is_the_change_itself(bits: int, make: Callable[[int, int], torch.Tensor]) -> None:
    values = make(5000, 5)
    found = torch.stack([passed(Eden(bits), values, context_of(5000, key)) for key in range(200)])
    deviations = standard_errors(found, values)
    assert float(deviations.max()) < 5
    assert float(deviations.square().mean()) < 1.06


def test_what_no_number_of_keys_averages_out_is_small_in_large_blocks() -> None:
    """Log-normal values at one bit: the squared bias, less what chance leaves of 100 keys, against ||x||^2."""
    values, n_keys = heavy(40_000, 5), 100
    found = torch.stack([passed(Eden(1), values, context_of(40_000, key)) for key in range(n_keys)]).double()
    chance = float(found.var(0).sum() / values.double().square().sum()) / n_keys
    assert relative_error(found.mean(0), values) - chance < 3e-4


def test_of_two_unequal_spikes_among_zeros_one_is_lost_whatever_the_key() -> None:
    """The limit that the module owns up to: in a block of 16, at one bit."""
    values = torch.zeros(16)
    values[3], values[9] = 3.0, 1.0
    context = CodecContext(Layout((TensorSpec("x", (16,), "float32", 0),)), 7)
    expected = torch.zeros(16)
    expected[3] = 10 / 3
    torch.testing.assert_close(passed(Eden(1), values, context), expected, rtol=0, atol=1e-5)


def test_the_errors_of_clients_that_agree_average_out() -> None:
    """Ten clients, one vector, one bit: 0.571 / 10. Under a rotation they share it would stay at 0.571."""
    values = heavy(1 << 16)
    mean = torch.stack([passed(Eden(1), values, context_of(1 << 16, 3, index)) for index in range(10)]).mean(0)
    assert relative_error(mean, values) == pytest.approx(0.0571, rel=0.03)


def test_blocks_of_very_different_energy_are_each_right() -> None:
    """One scale for all would blow up what lies in quiet blocks."""
    values = gaussian(1 << 16)
    values[: 1 << 15] *= 1e-3
    found = passed(Eden(2), values, context_of(1 << 16))
    assert float(found.double() @ values.double()) == pytest.approx(float(values.double().square().sum()), rel=1e-5)


def test_a_payload_has_little_beside_its_bits() -> None:
    payload = payload_of(Eden(3), gaussian(1 << 18), context_of(1 << 18))
    assert len(payload) * 8 / (1 << 18) < 3.01


@pytest.mark.parametrize("bits", [0, 9])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 8"):
        Eden(bits)
