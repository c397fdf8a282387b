"""The sparse codecs: places are read as they were written; the random mask; the largest coordinates."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, decoded, gaussian, heavy, passed, payload_of, relative_error
from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.vectors.codec import CHUNK_VALUES, Sketching
from umbel.aggregation.codec.vectors.sparse import (
    RandomMask,
    TopK,
    bitmap_bytes,
    bitmap_read,
    bitmap_written,
    gaps_read,
    gaps_written,
    largest,
    one_in_every,
    scattered,
)
from umbel.aggregation.errors import LyingLength, MalformedUpdate, NonFiniteUpdate, UpdateRefused

WIDE = 1 << 48
PLACES = st.sets(st.one_of(st.integers(0, 300), st.integers(0, WIDE - 1)), max_size=30).map(sorted)


def octets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def varint(value: int) -> list[int]:
    """LEB128, one digit after the other."""
    return [value] if value < 128 else [value & 127 | 128, *varint(value >> 7)]


@given(PLACES)
def test_gaps_are_read_as_they_were_written(places: list[int]) -> None:
    indices = torch.tensor(places, dtype=torch.int64)
    written = gaps_written(indices)
    gaps = [place - before - 1 for before, place in zip([-1, *places], places, strict=False)]
    assert written.tolist() == [byte for gap in gaps for byte in varint(gap)]
    assert torch.equal(gaps_read(written, len(places), WIDE), indices)


@given(st.sets(st.integers(0, 299)).map(sorted), st.integers(300, 310))
def test_a_bitmap_is_read_as_it_was_written(places: list[int], n_values: int) -> None:
    indices = torch.tensor(places, dtype=torch.int64)
    written = bitmap_written(indices, n_values)
    assert written.numel() == bitmap_bytes(n_values)
    assert torch.equal(bitmap_read(written, len(places), n_values), indices)


@pytest.mark.parametrize(
    ("data", "count", "error", "words"),
    [
        (octets(1, 2), 3, LyingLength, "lists 2 coordinates but declares 3"),
        (octets(1, 2, 3), 2, LyingLength, "lists 3 coordinates but declares 2"),
        (octets(1, 0x82), 1, LyingLength, "lists 1 coordinates"),
        (octets(), 1, LyingLength, "lists 0 coordinates"),
        (octets(0x81, 0x00), 1, MalformedUpdate, "more bytes than it needs"),
        (octets(*[0x80] * 7, 0x01), 1, MalformedUpdate, "more bytes than it needs"),
        (octets(*varint(100)), 1, MalformedUpdate, "lists coordinate 100; the last one is 99"),
        (octets(*varint(99), 0), 2, MalformedUpdate, "lists coordinate 100; the last one is 99"),
        (octets(*varint((1 << 49) - 1) * 3), 3, MalformedUpdate, "beyond the last one; the update has 100 values"),
    ],
)
def test_other_gaps_are_refused(data: torch.Tensor, count: int, error: type[UpdateRefused], words: str) -> None:
    with pytest.raises(error, match=words):
        gaps_read(data, count, 100)


def test_gaps_whose_sum_would_wrap_round_are_refused() -> None:
    """2^15 gaps of 2^49 - 1 add up to 2^64 and a little less: in int64 that is a small negative number."""
    with pytest.raises(MalformedUpdate, match="beyond"):
        gaps_read(octets(*varint((1 << 49) - 1) * (1 << 15)), 1 << 15, WIDE)


def test_other_bitmaps_are_refused() -> None:
    with pytest.raises(LyingLength, match="2 bytes"):
        bitmap_read(octets(1), 1, 9)
    with pytest.raises(LyingLength, match="has 1 coordinates"):
        bitmap_read(octets(1, 0), 2, 9)
    with pytest.raises(MalformedUpdate, match="coordinate 9; the last one is 8"):
        bitmap_read(octets(0, 2), 1, 9)


@given(st.integers(1, 200), st.integers(0, 2000), st.integers(0, (1 << 63) - 1))
def test_each_run_has_one_coordinate(every: int, n_values: int, key: int) -> None:
    chosen = one_in_every(key, every, n_values)
    assert (chosen // every).tolist()[: n_values // every] == list(range(n_values // every))
    assert bool((chosen < n_values).all())
    assert chosen.numel() in (n_values // every, -(-n_values // every))


def test_each_place_of_a_run_is_as_likely() -> None:
    counts = torch.bincount(one_in_every(5, 7, 700_000) % 7).double()
    assert float(((counts - 100_000 / 7).square() / (100_000 / 7)).sum()) < 22  # chi squared of 6: 1 in 1,000


def test_values_are_scattered_over_chunks() -> None:
    n_values = 2 * CHUNK_VALUES + 3
    indices = torch.tensor([0, CHUNK_VALUES - 1, CHUNK_VALUES, n_values - 1])
    found = list(scattered(indices, torch.tensor([1.0, 2.0, 3.0, 4.0]), n_values))
    assert [chunk.numel() for chunk in found] == [CHUNK_VALUES, CHUNK_VALUES, 3]
    whole = torch.cat(found)
    assert whole[indices].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert int((whole != 0).sum()) == 4


@given(st.integers(0, 3000), st.integers(1, 50), st.integers(0, 99))
def test_what_was_trained_within_the_mask_comes_back_as_it_is(n_values: int, every: int, key: int) -> None:
    codec, context = RandomMask(every, Sketching.STRUCTURED), context_of(n_values, key)
    trained = torch.cat([mask.view(-1) for mask in codec.trained(context).values()])
    values = torch.where(trained, heavy(n_values), 0.0)
    assert torch.equal(passed(codec, values, context), values)
    assert torch.equal(passed(codec, heavy(n_values), context), values)  # of any other change, the part within


def test_masks_have_the_shapes_of_the_tensors() -> None:
    context = context_of(1000)
    masks = RandomMask(4).trained(context)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {"a.weight": (12, 41), "b.bias": (508,)}
    assert sum(int(mask.sum()) for mask in masks.values()) == 250


def test_a_cohort_shares_its_mask_and_a_round_has_its_own() -> None:
    codec = RandomMask(10)
    assert torch.equal(codec.chosen(context_of(5000, 1, 3)), codec.chosen(context_of(5000, 1, 4)))
    assert not torch.equal(codec.chosen(context_of(5000, 1)), codec.chosen(context_of(5000, 2)))


@pytest.mark.parametrize("every", [2, 10])
def test_the_error_of_a_sketch_is_that_of_theory(every: int) -> None:
    values = gaussian(1 << 18)
    error = relative_error(passed(RandomMask(every), values, context_of(1 << 18)), values)
    assert error == pytest.approx(every - 1, rel=0.02)


@pytest.mark.parametrize(("precision", "bits"), [(Precision.FLOAT32, 3.2), (Precision.BFLOAT16, 1.6)])
def test_a_tenth_of_the_coordinates_takes_a_tenth_of_the_bytes(precision: Precision, bits: float) -> None:
    payload = payload_of(RandomMask(10, precision=precision), gaussian(100_000), context_of(100_000))
    assert len(payload) * 8 / 100_000 == bits


def test_only_exact_values_are_linear() -> None:
    assert RandomMask().is_linear
    assert not RandomMask(precision=Precision.BFLOAT16).is_linear


@pytest.mark.parametrize("every", [0, (1 << 20) + 1])
def test_other_masks_are_refused(every: int) -> None:
    with pytest.raises(ValueError, match="every"):
        RandomMask(every)


def test_a_gradient_is_masked_where_it_is() -> None:
    """Torch's "meta" device takes no operand from the processor, as a GPU takes none."""
    context = context_of(1000)
    projections = RandomMask(4).projections(context)
    gradients = {name: torch.ones(mask.shape, device="meta") for name, mask in RandomMask(4).trained(context).items()}
    assert {projections[name](gradient).device.type for name, gradient in gradients.items()} == {"meta"}


EXACT = Precision.FLOAT32


@given(st.integers(1, 5000), st.floats(0.0001, 1), st.integers(0, 99))
def test_the_largest_are_kept_as_they_are(n_values: int, share: float, seed: int) -> None:
    codec, values = TopK(share, EXACT), heavy(n_values, seed)
    found, k = passed(codec, values, context_of(n_values)), codec.k(n_values)
    kept = found != 0
    assert int(kept.sum()) == k
    assert torch.equal(found[kept], values[kept])
    assert k == n_values or float(values[~kept].abs().max()) <= float(values[kept].abs().min())
    assert relative_error(found, values) <= 1 - k / n_values + 1e-6


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1, 0.9])
@pytest.mark.parametrize("key", range(3))
def test_a_threshold_from_a_sample_finds_exactly_the_largest(share: float, key: int) -> None:
    values = heavy(600_001, key)
    k = TopK(share).k(values.numel())
    assert torch.equal(largest(values, k, key), values.abs().topk(k).indices.sort().values)


def test_a_sample_that_misleads_leaves_fewer_never_more() -> None:
    """The large values stand where, by luck, only the sample looks."""
    values = torch.full((600_001,), 1e-3)
    values[one_in_every(4, -(-600_001 // (1 << 16)), 600_001)] = 1.0
    found = largest(values, 100_000, 4)
    assert 0 < found.numel() <= 100_000


@given(st.integers(1, 2000), st.integers(0, 50))
def test_values_that_are_all_alike_are_still_k_at_most(n_values: int, n_others: int) -> None:
    values = torch.ones(n_values)
    values[:n_others] = 0.0
    codec = TopK(0.1, EXACT)
    n_kept = int((passed(codec, values, context_of(n_values)) != 0).sum())
    assert n_kept == min(codec.k(n_values), max(n_values - n_others, 0))


def test_zeros_are_not_sent() -> None:
    values = torch.zeros(100_000)
    values[77] = -3.0
    payload = payload_of(TopK(0.5), values, context_of(100_000))
    assert len(payload) == 9 + 2 + 1
    assert decoded(TopK(0.5), [payload], context_of(100_000))[77] == -3.0


@pytest.mark.parametrize(("share", "form"), [(0.001, 0), (0.1, 0), (0.2, 1), (0.9, 1)])
def test_places_take_the_shorter_form(share: float, form: int) -> None:
    codec, n_values = TopK(share), 100_000
    payload = payload_of(codec, gaussian(n_values), context_of(n_values))
    n_places = len(payload) - 9 - 2 * codec.k(n_values)
    assert payload[0] == form
    assert n_places <= bitmap_bytes(n_values)
    assert form == 0 or n_places == bitmap_bytes(n_values)


def test_half_precision_rounds_to_nearest_and_never_to_infinity() -> None:
    values = torch.tensor([1.00390625, 1.01171875, 3.4e38, -3.4e38])
    found = passed(TopK(1.0), values, context_of(4))
    most = torch.finfo(torch.bfloat16).max
    assert found.tolist() == [1.0, 1.015625, most, -most]


def head(form: int, count: int) -> bytes:
    return struct.pack("<BQ", form, count)


ONE = struct.pack("<f", 1.0)


@pytest.mark.parametrize(
    ("payload", "error", "words"),
    [
        (head(2, 1) + ONE + b"\x00", MalformedUpdate, "not 2"),
        (head(0, 11) + ONE * 11 + bytes(11), LyingLength, "declares 11 coordinates; the plan allows at most 10"),
        (head(0, (1 << 64) - 1), LyingLength, "the plan allows at most 10"),
        (head(0, 2) + ONE, LyingLength, "ends too early"),
        (head(0, 1) + ONE + b"\x64", MalformedUpdate, "coordinate 100; the last one is 99"),
        (head(0, 1) + ONE + b"\x01\x01", LyingLength, "lists 2"),
        (head(0, 0) + b"\x01", LyingLength, "lists 1"),
        (head(0, 1) + ONE + bytes(14), LyingLength, "too long"),
        (head(1, 1) + ONE + b"\x01", LyingLength, "13 bytes"),
        (head(1, 1) + ONE + b"\x03" + bytes(12), LyingLength, "has 2 coordinates"),
        (head(0, 1) + struct.pack("<f", float("nan")) + b"\x00", NonFiniteUpdate, "NaN"),
    ],
)
def test_what_the_plan_does_not_allow_is_refused(payload: bytes, error: type[UpdateRefused], words: str) -> None:
    with pytest.raises(error, match=words):
        decoded(TopK(0.1, EXACT), [payload], context_of(100))


@pytest.mark.parametrize("share", [0.0, 1.01, float("nan")])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        TopK(share)
