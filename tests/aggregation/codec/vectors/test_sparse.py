"""Places of coordinates: gaps and bitmaps read as they were written, and whatever else refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.codec.vectors.codec import CHUNK_VALUES
from umbel.aggregation.codec.vectors.sparse import (
    bitmap_bytes,
    bitmap_read,
    bitmap_written,
    gaps_read,
    gaps_written,
    one_in_every,
    scattered,
)
from umbel.aggregation.errors import LyingLength, MalformedUpdate, UpdateRefused

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
        (octets(*varint(100)), 1, MalformedUpdate, "names coordinate 100 of 100"),
        (octets(*varint(99), 0), 2, MalformedUpdate, "names coordinate 100 of 100"),
        (octets(*varint((1 << 49) - 1) * 3), 3, MalformedUpdate, "beyond 100"),
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
    with pytest.raises(MalformedUpdate, match="coordinate 9 of 9"):
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
