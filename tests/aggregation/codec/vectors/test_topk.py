"""Top-k: really the largest, k at most, in the shorter of two forms; strangers' counts and places refused."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, decoded, gaussian, heavy, passed, payload_of, relative_error
from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.vectors.sparse import bitmap_bytes, one_in_every
from umbel.aggregation.codec.vectors.topk import TopK, largest
from umbel.aggregation.errors import LyingLength, MalformedUpdate, NonFiniteUpdate, UpdateRefused

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
        (head(0, 11) + ONE * 11 + bytes(11), LyingLength, "declares 11 coordinates; the plan allows 10"),
        (head(0, (1 << 64) - 1), LyingLength, "the plan allows 10"),
        (head(0, 2) + ONE, LyingLength, "breaks off"),
        (head(0, 1) + ONE + b"\x64", MalformedUpdate, "coordinate 100 of 100"),
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
