"""Trits: their packing, their error against the formula, and what clipping does."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, decoded, gaussian, heavy, passed, payload_of, relative_error
from umbel.aggregation.codec.kernels.packing import packed_bytes
from umbel.aggregation.codec.vectors.ternary import Ternary, trit_bytes, trits_read, trits_written
from umbel.aggregation.errors import MalformedUpdate


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
    with pytest.raises(MalformedUpdate, match="no five trits"):
        decoded(Ternary(), [bytes(payload)], context_of(20))


def test_trits_past_the_end_are_refused() -> None:
    payload = bytearray(payload_of(Ternary(), gaussian(6), context_of(6)))
    payload[-1] = 3
    with pytest.raises(MalformedUpdate, match="follow the last"):
        decoded(Ternary(), [bytes(payload)], context_of(6))


@pytest.mark.parametrize("clip", [0.5, float("nan"), float("inf")])
def test_a_clip_below_a_deviation_is_refused(clip: float) -> None:
    with pytest.raises(ValueError, match="clip_sigmas"):
        Ternary(clip)
