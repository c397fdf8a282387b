"""Entropy coding: nothing is lost, little is wasted, and strangers' bytes are read or refused."""

import struct

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.codec.entropy.entropy import (
    SEGMENT,
    best_widths,
    entropy_bits,
    read_segment,
    write_block,
    write_segment,
    written_bytes_max,
)
from umbel.aggregation.codec.entropy.entropy_kernels import MIRRORED, N_CLASSES, WIDTHS
from umbel.aggregation.codec.entropy.payload import Payload
from umbel.aggregation.errors import LyingLength, MalformedUpdate, UpdateRefused
from umbel.aggregation.types import LEVEL_MAX

ANY_LEVEL = st.one_of(st.integers(-2, 2), st.integers(-200, 200), st.sampled_from([LEVEL_MAX, -LEVEL_MAX]))
ANY_CLASS = st.one_of(st.sampled_from([0, MIRRORED, 3, 31]), st.integers(0, 31), st.integers(MIRRORED, MIRRORED + 31))
VALUES = st.lists(st.tuples(ANY_LEVEL, ANY_CLASS), min_size=1, max_size=300)
ANY_WIDTHS = st.tuples(*[st.sampled_from(WIDTHS)] * N_CLASSES)
MIXED = WIDTHS * (N_CLASSES // len(WIDTHS))


def rounded(scale: float, n_values: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(n_values, generator=draw) * scale).round().clamp(-LEVEL_MAX, LEVEL_MAX).to(torch.int32)


def random_classes(n_values: int, highest: int = 255) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, highest + 1, (n_values,), generator=draw, dtype=torch.uint8) & (MIRRORED | N_CLASSES - 1)


def split(values: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    levels, classes = zip(*values, strict=True)
    return torch.tensor(levels, dtype=torch.int32), torch.tensor(classes, dtype=torch.uint8)


def same(width: int) -> tuple[int, ...]:
    return (width,) * N_CLASSES


def block(raw: bytes) -> bytes:
    return write_block([torch.frombuffer(bytearray(raw), dtype=torch.uint8)])


@given(VALUES, ANY_WIDTHS, st.integers(1, 50))
def test_what_was_written_is_read(values: list[tuple[int, int]], widths: tuple[int, ...], n_piece: int) -> None:
    levels, classes = split(values)
    data = write_segment(levels, classes, widths)
    assert len(data) <= written_bytes_max(len(values))
    payload = Payload(data[first : first + n_piece] for first in range(0, len(data), n_piece))
    segment = read_segment(payload, classes, widths)
    payload.end()
    assert torch.equal(segment.levels(), levels)
    assert segment.folded.greatest == int(levels.abs().max())
    assert segment.folded.sum_of_squares == int(levels.to(torch.int64).square().sum())


@pytest.mark.parametrize("n_values", [1, 3, 4, 5, 2047, 2049, SEGMENT - 1, SEGMENT])
@pytest.mark.parametrize("width", WIDTHS)
def test_segments_of_any_length_come_through(n_values: int, width: int) -> None:
    levels, classes = rounded(40.0, n_values), random_classes(n_values)
    data = write_segment(levels, classes, same(width))
    assert torch.equal(read_segment(Payload([data]), classes, same(width)).levels(), levels)


def test_symbols_share_bytes_and_excesses_follow() -> None:
    """Class 0, two bits: zig-zag 1, 3+1, 3+0, 0, 3+6; its two bytes hold values 0, 2, 4 and 1, 3. Class 2, eight bits:
    zig-zag 2 of -1 mirrored, and 255+9,745. Then the low bytes of the excesses 1, 0, 6, 9,745, then the high ones.
    """
    levels = torch.tensor([-1, -1, 2, -2, 5000, 0, -5], dtype=torch.int32)
    classes = torch.tensor([0, 2 | MIRRORED, 0, 0, 2, 0, 0], dtype=torch.uint8)
    data = write_segment(levels, classes, (2, 1, 8, *[4] * 29))
    assert struct.unpack_from("<I", data) == (len(data) - 4,)
    raw = zstandard.ZstdDecompressor().decompress(data[4:])
    excesses = [1, 0, 6, 10_000 - 255]
    low, high = [one & 0xFF for one in excesses], [one >> 8 for one in excesses]
    assert list(raw) == [1 | 3 << 2 | 3 << 4, 3, 2, 255, *low, *high]


@pytest.mark.parametrize("scale", [0.4, 0.7, 1.2, 2.5, 6.0, 20.0])
def test_the_best_width_comes_close_to_the_entropy(scale: float) -> None:
    levels, classes = rounded(scale, SEGMENT), torch.zeros(SEGMENT, dtype=torch.uint8)
    widths, n_bytes = best_widths([(levels[: SEGMENT // 8], classes[: SEGMENT // 8])])
    bits = 8 * len(write_segment(levels, classes, widths)) / levels.numel()
    assert bits <= 1.1 * entropy_bits(levels)
    assert 8 * n_bytes / (SEGMENT // 8) == pytest.approx(bits, rel=0.03)


def test_classes_apart_cost_what_each_costs_alone() -> None:
    scales = (0.1, 0.5, 2.0, 9.0)
    classes = random_classes(SEGMENT, highest=3)
    alone = [rounded(scale, SEGMENT, seed) for seed, scale in enumerate(scales)]
    levels = torch.stack(alone)[classes.long(), torch.arange(SEGMENT)]
    widths, _ = best_widths([(levels, classes)])
    bits = 8 * len(write_segment(levels, classes, widths)) / SEGMENT
    assert bits <= 1.1 * sum(map(entropy_bits, alone)) / 4 < 0.85 * entropy_bits(levels)


@given(st.data(), ANY_WIDTHS)
@settings(max_examples=200)
def test_changed_bytes_are_read_or_refused(data: st.DataObject, widths: tuple[int, ...]) -> None:
    levels, classes = rounded(2.0, 200), random_classes(200)
    good = write_segment(levels, classes, widths)
    first, last = sorted((data.draw(st.integers(0, len(good))), data.draw(st.integers(0, len(good)))))
    bad = good[:first] + data.draw(st.binary(max_size=20)) + good[last:]
    try:
        found = read_segment(Payload([bad]), classes, widths).levels()
    except UpdateRefused:
        return
    assert found.numel() == 200
    assert int(found.abs().max()) <= 1 << 15


@given(st.binary(min_size=50, max_size=250))
def test_any_bytes_that_are_read_could_have_been_written(data: bytes) -> None:
    classes = random_classes(100, highest=1)
    try:
        levels = read_segment(Payload([block(data)]), classes, same(4)).levels()
    except (MalformedUpdate, LyingLength):
        return
    again = write_segment(levels, classes, same(4))
    assert zstandard.ZstdDecompressor().decompress(again[4:]) == data, "one way to write it, and no other"


ONE_CLASS = torch.zeros(10, dtype=torch.uint8)
ESCAPES = b"\xff" * 5  # ten symbols of 15


@pytest.mark.parametrize(
    ("raw", "refusal"),
    [
        (bytes(4), LyingLength),
        (bytes(6), LyingLength),
        (bytes(5 + 22), LyingLength),
        (bytes(5 + 2), MalformedUpdate),
        (ESCAPES + bytes(18), MalformedUpdate),
        (ESCAPES + b"\xff" * 20, MalformedUpdate),
    ],
)
def test_a_wrong_number_of_large_values_and_too_large_ones_are_refused(
    raw: bytes, refusal: type[UpdateRefused]
) -> None:
    with pytest.raises(refusal):
        read_segment(Payload([block(raw)]), ONE_CLASS, same(4))


def test_symbols_after_the_last_are_refused() -> None:
    with pytest.raises(MalformedUpdate, match="padding after the update's last value is not zero"):
        read_segment(Payload([block(b"\0\x80")]), ONE_CLASS[:9], same(1))


def test_a_frame_that_claims_much_is_refused_before_it_is_read() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(LyingLength, match="states 67108864 bytes"):
        read_segment(Payload([struct.pack("<I", len(bomb)), bomb]), random_classes(1 << 13), MIXED)
    with pytest.raises(LyingLength, match="has 4294967295 bytes"):
        read_segment(Payload([b"\xff" * 4]), ONE_CLASS, MIXED)


def test_a_frame_that_holds_other_than_it_claims_or_is_followed_by_bytes_is_refused() -> None:
    good = zstandard.ZstdCompressor().compress(bytes(5))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5))
    lying = bytearray(good)
    lying[5] += 2
    for bad in (good + b"\0", good + good, unsized, bytes(lying), good[:-1]):
        with pytest.raises((LyingLength, MalformedUpdate)):
            read_segment(Payload([struct.pack("<I", len(bad)), bad]), ONE_CLASS, same(4))
    assert read_segment(Payload([struct.pack("<I", len(good)), good]), ONE_CLASS, same(4)).folded.greatest == 0
