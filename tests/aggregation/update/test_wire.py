"""The 64 bytes at the head of an update: every malformed one its own error."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.errors import LyingLength, MalformedUpdate, UpdateRefused, WrongCodec, WrongLayout
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec
from umbel.aggregation.update import wire
from umbel.aggregation.update.wire import HEADER_BYTES, UpdateHeader, float32_header

BYTES = range(28, 29)
LAYOUT = Layout.of_state({"w": torch.zeros(5), "b": torch.zeros(2)})
HEADER = float32_header(LAYOUT).encode()


def read_header(data: bytes, layout: Layout) -> UpdateHeader:
    return wire.read_header(data, layout, Codec.FLOAT32, BYTES)


def with_bytes(offset: int, data: bytes) -> bytes:
    return HEADER[:offset] + data + HEADER[offset + len(data) :]


def test_a_header_is_64_bytes_and_reads_back() -> None:
    assert len(HEADER) == HEADER_BYTES
    assert read_header(HEADER, LAYOUT) == UpdateHeader(Codec.FLOAT32, 7, bytes.fromhex(LAYOUT.digest), 28)


def test_what_follows_the_header_is_not_looked_at() -> None:
    assert read_header(HEADER + b"\xff" * 99, LAYOUT) == read_header(HEADER, LAYOUT)


def test_a_payload_may_have_a_range_of_lengths() -> None:
    assert wire.read_header(HEADER, LAYOUT, Codec.FLOAT32, range(20, 29)).payload_bytes == 28
    with pytest.raises(LyingLength, match="28 bytes; the model has 7 values, which take 20 to 27 bytes"):
        wire.read_header(HEADER, LAYOUT, Codec.FLOAT32, range(20, 28))


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (b"", MalformedUpdate),
        (HEADER[:63], MalformedUpdate),
        (with_bytes(0, b"UMBM"), MalformedUpdate),
        (with_bytes(4, b"\x00"), MalformedUpdate),
        (with_bytes(4, b"\x02"), MalformedUpdate),
        (with_bytes(6, b"\x01"), MalformedUpdate),
        (with_bytes(7, b"\x80"), MalformedUpdate),
        (with_bytes(56, b"\x01"), MalformedUpdate),
        (with_bytes(63, b"\x01"), MalformedUpdate),
        (with_bytes(5, b"\x01"), WrongCodec),
        (with_bytes(5, b"\xff"), WrongCodec),
        (with_bytes(16, b"\0" * 32), WrongLayout),
        (with_bytes(8, struct.pack("<Q", 8)), LyingLength),
        (with_bytes(8, b"\xff" * 8), LyingLength),
        (with_bytes(48, struct.pack("<Q", 27)), LyingLength),
        (with_bytes(48, b"\xff" * 8), LyingLength),
    ],
)
def test_each_malformed_header_has_its_own_error(data: bytes, refusal: type[UpdateRefused]) -> None:
    with pytest.raises(UpdateRefused) as caught:
        read_header(data, LAYOUT)
    assert type(caught.value) is refusal
    assert str(caught.value)


def test_errors_are_checked_in_the_order_the_docstring_says() -> None:
    with pytest.raises(WrongCodec):
        read_header(with_bytes(5, b"\x01")[:8] + b"\xff" * 48 + b"\0" * 8, LAYOUT)
    with pytest.raises(WrongLayout):
        read_header(HEADER[:8] + b"\xff" * 48 + b"\0" * 8, LAYOUT)


@given(st.binary(max_size=80))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UpdateRefused):
        read_header(data, LAYOUT)


@given(st.integers(0, 63), st.integers(1, 255))
def test_no_byte_of_the_header_can_change_unseen(at: int, flip: int) -> None:
    with pytest.raises(UpdateRefused):
        read_header(with_bytes(at, bytes([HEADER[at] ^ flip])), LAYOUT)
