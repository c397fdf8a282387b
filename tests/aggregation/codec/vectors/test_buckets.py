"""The codecs with a scale for each bucket: means of both sides, trits, and levels of a norm."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, decoded, gaussian, heavy, passed, payload_of, relative_error
from umbel.aggregation.codec.entropy.frame import compress
from umbel.aggregation.codec.vectors.buckets import (
    BUCKET_VALUES,
    LEVELS_MAX,
    Qsgd,
    Sign,
    Ternary,
    trit_bytes,
    trits_read,
    trits_written,
    zig_zag_read,
    zig_zag_written,
)
from umbel.aggregation.errors import MalformedUpdate, UpdateOutOfRange
from umbel.aggregation.kernels.packing import packed_bytes


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


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=40))
def test_trits_are_read_as_they_were_written(trits: list[float]) -> None:
    values = torch.tensor(trits)
    written = trits_written(values)
    assert written.numel() == trit_bytes(len(trits))
    assert torch.equal(trits_read(written, len(trits)), values)


@given(st.integers(0, 1 << 40))
def test_five_trits_in_a_byte_are_never_longer_than_fields_of_two_bits(n_values: int) -> None:
    assert trit_bytes(n_values) <= -(-n_values // 4) <= packed_bytes(n_values, 2)


@pytest.mark.parametrize("make", [gaussian, heavy])
def test_the_error_is_that_of_the_formula(make: Callable[[int, int], torch.Tensor]) -> None:
    values = make(1 << 17, 3)
    found = passed(Ternary(), values, context_of(1 << 17))
    buckets = values.double().view(-1, 4096)
    expected = (buckets.abs().amax(1) * buckets.abs().sum(1)).sum() - buckets.square().sum()
    assert relative_error(found, values) == pytest.approx(float(expected / buckets.square().sum()), rel=0.02)


def test_each_bucket_has_zeros_and_its_largest_value() -> None:
    values = heavy(9000)
    found = passed(Ternary(), values, context_of(9000))
    for bucket, read in zip(values.split(4096), found.split(4096), strict=True):
        largest = bucket.abs().max()
        assert set(read.tolist()) <= {0.0, float(largest), -float(largest)}
        assert bool((read[read != 0].sign() == bucket[read != 0].sign()).all())


def test_clipping_makes_a_smaller_error_and_a_smaller_vector() -> None:
    values = gaussian(1 << 17)
    clipped, whole = (passed(Ternary(clip), values, context_of(1 << 17)) for clip in (2.5, None))
    assert relative_error(clipped, values) < 0.75 * relative_error(whole, values)
    assert float(clipped @ values) < float(values @ values) * 0.998


def test_a_coordinate_takes_1_6_bits_and_a_little() -> None:
    payload = payload_of(Ternary(), gaussian(1 << 18), context_of(1 << 18))
    assert len(payload) * 8 / (1 << 18) < 1.61


def test_bytes_that_hold_no_trits_are_refused() -> None:
    payload = bytearray(payload_of(Ternary(), gaussian(20), context_of(20)))
    payload[-1] = 243
    with pytest.raises(MalformedUpdate, match="does not hold five ternary values"):
        decoded(Ternary(), [bytes(payload)], context_of(20))


def test_trits_past_the_end_are_refused() -> None:
    payload = bytearray(payload_of(Ternary(), gaussian(6), context_of(6)))
    payload[-1] = 3
    with pytest.raises(MalformedUpdate, match="after the update's last ternary value"):
        decoded(Ternary(), [bytes(payload)], context_of(6))


@pytest.mark.parametrize("clip", [0.5, float("nan"), float("inf")])
def test_a_clip_below_a_deviation_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match="clip_sigmas"):
        Ternary(clip)


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
    with pytest.raises(UpdateOutOfRange, match="between -5 and 5"):
        decoded(Qsgd(5), compress([raw], len(raw)), context_of(1))


@pytest.mark.parametrize("levels", [0, LEVELS_MAX + 1])
def test_other_numbers_of_levels_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match="levels"):
        Qsgd(levels)
