"""Entropy coding: nothing is lost, little is wasted, and strangers' bytes are read or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.aggregation.codec.entropy import (
    SEGMENT,
    WIDTHS,
    best_width,
    compress,
    compressed_bytes_max,
    decompress,
    entropy_bits,
    of_bytes,
    raw_bytes,
    to_bytes,
)
from umbel.aggregation.codec.quantize import LEVEL_MAX
from umbel.aggregation.errors import MalformedUpdate, UpdateRefused

LEVELS = st.lists(
    st.one_of(st.integers(-2, 2), st.integers(-200, 200), st.sampled_from([LEVEL_MAX, -LEVEL_MAX])), max_size=300
)


def rounded(scale: float, n_values: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(n_values, generator=draw) * scale).round().clamp(-LEVEL_MAX, LEVEL_MAX).to(torch.int32)


def whole(levels: torch.Tensor, width: int) -> bytes:
    return b"".join(compress(torch.split(levels, SEGMENT), levels.numel(), width))


def read(data: bytes, n_values: int, width: int, n_piece: int = 1 << 20) -> torch.Tensor:
    pieces = [data[first : first + n_piece] for first in range(0, len(data), n_piece)]
    return torch.cat([torch.zeros(0, dtype=torch.int32), *decompress(pieces, n_values, width)])


@given(LEVELS, st.sampled_from(WIDTHS), st.integers(1, 50))
def test_what_was_written_is_read(values: list[int], width: int, n_piece: int) -> None:
    levels = torch.tensor(values, dtype=torch.int32)
    data = whole(levels, width)
    assert len(data) <= compressed_bytes_max(len(values))
    assert torch.equal(read(data, len(values), width, n_piece), levels)


@pytest.mark.parametrize("n_values", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 77])
@pytest.mark.parametrize("width", WIDTHS)
def test_segments_follow_each_other(n_values: int, width: int) -> None:
    levels = rounded(40.0, n_values)
    assert torch.equal(read(whole(levels, width), n_values, width), levels)


@given(LEVELS, st.sampled_from(WIDTHS))
def test_the_raw_length_follows_from_the_number_of_values(values: list[int], width: int) -> None:
    assert to_bytes(torch.tensor(values, dtype=torch.int32), width).numel() == raw_bytes(len(values), width)


def test_symbols_share_bytes_and_excesses_follow() -> None:
    """Zig-zag 1, 4, 3, 0, 9 in two bits: 1, 3+1, 3+0, 0, 3+6. Two bytes hold values 0, 2, 4 and 1, 3."""
    data = to_bytes(torch.tensor([-1, 2, -2, 0, -5], dtype=torch.int32), 2)
    assert data.tolist() == [1 | 3 << 2 | 3 << 4, 3, 1, 0, 6, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("scale", [0.4, 0.7, 1.2, 2.5, 6.0, 20.0])
def test_the_best_width_comes_close_to_the_entropy(scale: float) -> None:
    levels = rounded(scale, 4 * SEGMENT)
    bits = 8 * len(whole(levels, best_width([levels[:SEGMENT]]))) / levels.numel()
    assert bits <= 1.1 * entropy_bits(levels)


@given(st.data(), st.sampled_from(WIDTHS))
@settings(max_examples=200)
def test_changed_bytes_are_read_or_refused(data: st.DataObject, width: int) -> None:
    levels = rounded(2.0, 200)
    good = whole(levels, width)
    first, last = sorted((data.draw(st.integers(0, len(good))), data.draw(st.integers(0, len(good)))))
    bad = good[:first] + data.draw(st.binary(max_size=20)) + good[last:]
    try:
        found = read(bad, 200, width)
    except UpdateRefused:
        return
    assert found.numel() == 200
    assert int(found.abs().max()) <= 1 << 15


@given(st.binary(min_size=250, max_size=250))
def test_any_segment_is_read_or_refused(data: bytes) -> None:
    segment = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        levels = of_bytes(segment, 100, 4)
    except MalformedUpdate:
        return
    assert torch.equal(to_bytes(levels, 4), segment), "one way to write it, and no other"
