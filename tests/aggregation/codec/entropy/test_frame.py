"""Frames from strangers: bombs, lies and appendages have typed refusals, and cost little memory."""

import random
import struct
import tracemalloc
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeAlias

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.codec.entropy.frame import (
    compress,
    compress_apart,
    compressed_bytes,
    decompress,
    decompress_whole,
    framed_bytes_max,
)
from umbel.aggregation.errors import LyingLength, MalformedUpdate, UpdateRefused

MIB = 1 << 20


def read(pieces: Iterable[bytes], n_raw: int) -> bytes:
    return b"".join(decompress(pieces, n_raw))


def read_whole(pieces: Iterable[bytes], n_raw: int) -> bytes:
    return decompress_whole(b"".join(pieces), range(n_raw, n_raw + 1))


BOTH = pytest.mark.parametrize("read", [read, read_whole])
Reader: TypeAlias = Callable[[Iterable[bytes], int], bytes]


def framed(data: bytes, *, window_log: int = 19, **settings: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log, **settings)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


@given(st.lists(st.binary(max_size=1000), max_size=5), st.integers(1, 100), st.sampled_from([1, 9]))
def test_what_was_compressed_comes_back(pieces: list[bytes], n_piece: int, level: int) -> None:
    data = b"".join(pieces)
    made = b"".join(compress(pieces, len(data), level))
    assert len(made) <= framed_bytes_max(len(data))
    assert read((made[i : i + n_piece] for i in range(0, len(made), n_piece)), len(data)) == data


def test_parts_of_different_symbols_take_no_more_bytes_together_than_each_alone() -> None:
    """They share a frame and no code table; with one table for both they would take more."""
    rng = random.Random(1)
    parts = [bytes(rng.choices(range(first, first + 4), k=20_000)) for first in (0, 100)]
    made, n_raw = compress_apart(parts, 40_000), 40_000
    assert read_whole([made], n_raw) == b"".join(parts)
    assert len(made) <= sum(compressed_bytes(parts)) < len(b"".join(compress([b"".join(parts)], n_raw)))


@BOTH
def test_a_bomb_that_tells_the_truth_is_refused_by_its_header(read: Reader) -> None:
    bomb = framed(bytes(512 * MIB))
    assert len(bomb) < 20_000
    tracemalloc.start()
    with pytest.raises(LyingLength, match="states 536870912 bytes; it must state 1000"):
        read([bomb], 1000)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


@BOTH
def test_a_bomb_that_lies_is_refused_after_a_little(read: Reader) -> None:
    """The blocks of 512 MiB under the header of a frame of 1 MiB: both say so in four bytes at the same place."""
    bomb, honest = framed(bytes(512 * MIB)), framed(bytes(MIB))
    assert zstandard.get_frame_parameters(honest).content_size == MIB
    lying = honest[: zstandard.frame_header_size(honest)] + bomb[zstandard.frame_header_size(bomb) :]
    tracemalloc.start()
    with pytest.raises(UpdateRefused):
        read([lying], MIB)
    assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    tracemalloc.stop()


@BOTH
def test_a_frame_that_does_not_say_its_length_is_refused(read: Reader) -> None:
    with pytest.raises(LyingLength, match="states no length"):
        read([framed(b"x" * 100, write_content_size=0)], 100)


@pytest.mark.parametrize("after", [b"\0", b"another", framed(b""), framed(b"x" * 50)])
@pytest.mark.parametrize("is_apart", [True, False])
def test_nothing_may_follow(after: bytes, is_apart: bool) -> None:
    good = framed(b"x" * 100)
    with pytest.raises(LyingLength, match="bytes after the end"):
        read([good, after] if is_apart else [good + after], 100)


@BOTH
def test_a_skippable_frame_holds_nothing_whatever_it_says(read: Reader) -> None:
    """Zstandard's own words on one are its length, as if it held so many bytes."""
    skippable = struct.pack("<II", 0x184D2A50, 100) + bytes(100)
    assert zstandard.get_frame_parameters(skippable).content_size == 100
    for frame in (skippable, skippable + framed(b"x" * 100), framed(b"x" * 100) + skippable):
        with pytest.raises(UpdateRefused):
            read([frame], 100)


def test_one_of_several_lengths_may_be_claimed_and_all_are_named() -> None:
    assert decompress_whole(framed(b"x" * 12), range(10, 21, 2)) == b"x" * 12
    for n_raw in (9, 13, 22):
        with pytest.raises(LyingLength, match=f"states {n_raw} bytes; it must state 10 to 20 bytes, in steps of 2$"):
            decompress_whole(framed(b"x" * n_raw), range(10, 21, 2))


@BOTH
def test_a_frame_that_breaks_off_is_refused(read: Reader) -> None:
    good = framed(bytes(range(256)) * 10)
    for end in range(len(good)):
        with pytest.raises((MalformedUpdate, LyingLength)):
            read([good[:end]], 2560)


@BOTH
def test_a_large_window_is_refused(read: Reader) -> None:
    data = bytes(range(256)) * (4 * MIB // 256)
    with pytest.raises(MalformedUpdate, match="a window of 4194304 bytes"):
        read([framed(data, window_log=22)], len(data))


@BOTH
def test_a_dictionary_is_refused(read: Reader) -> None:
    words = zstandard.ZstdCompressionDict(b"the words of a dictionary" * 20, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    trained = zstandard.train_dictionary(1024, [bytes([i, j]) * 20 for i in range(40) for j in range(40)])
    assert words.dict_id() == 0, "a raw one leaves no trace: what it makes cannot be read, and that is all"
    data = bytes([1, 2]) * 40
    with pytest.raises(MalformedUpdate, match="needs a dictionary"):
        read([zstandard.ZstdCompressor(dict_data=trained).compress(data)], len(data))


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_read_or_refused(data: bytes, n_raw: int) -> None:
    with suppress(UpdateRefused):
        assert len(read([data], n_raw)) == n_raw
