"""The reader takes what the plan asks for, however the bytes come, and holds no more than a piece beside it."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, Precision, exactly, scales_written
from umbel.aggregation.errors import LyingLength, MalformedUpdate, NonFiniteUpdate

PIECES = st.lists(st.binary(max_size=9), max_size=9)


@given(PIECES, st.lists(st.integers(0, 20), max_size=9))
def test_what_is_taken_is_what_came(pieces: list[bytes], asked: list[int]) -> None:
    payload, whole, at = Payload(pieces), b"".join(pieces), 0
    for n_bytes in asked:
        if at + n_bytes > len(whole):
            with pytest.raises(LyingLength, match=f"{at + n_bytes - len(whole)} bytes are missing"):
                payload.take(n_bytes)
            return
        assert bytes(payload.take(n_bytes).tolist()) == whole[at : at + n_bytes]
        at += n_bytes
    assert bytes(payload.take_rest(len(whole)).tolist()) == whole[at:]
    payload.end()


@given(PIECES)
def test_the_end_is_where_nothing_follows(pieces: list[bytes]) -> None:
    if any(pieces):
        with pytest.raises(LyingLength, match="after the end"):
            Payload(pieces).end()
        with pytest.raises(LyingLength, match="too long"):
            Payload(pieces).take_rest(sum(map(len, pieces)) - 1)
    else:
        Payload(pieces).end()


def test_no_more_pieces_are_asked_for_than_are_needed() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"abc"

    payload = Payload(endless())
    assert bytes(payload.take(4).tolist()) == b"abca"
    with pytest.raises(LyingLength):
        payload.take_rest(1000)
    with pytest.raises(LyingLength):
        Payload(endless()).end()


def test_a_payload_that_goes_on_is_not_read_further_than_the_piece_that_is_too_many() -> None:
    pieces, read = iter([b"abc"] * 9), list[Buffer]()
    with pytest.raises(LyingLength, match="more bytes than the 4"):
        read.extend(exactly(pieces, 4))
    assert read == [b"abc"]
    assert len(list(pieces)) == 7


def test_scales_are_finite_and_not_negative() -> None:
    for scale, error in ((float("nan"), NonFiniteUpdate), (float("-inf"), NonFiniteUpdate), (-1.0, MalformedUpdate)):
        written = torch.tensor([1.0, scale]).view(torch.uint8).numpy().tobytes()
        with pytest.raises(error):
            Payload([written]).take_scales(2)
    with pytest.raises(ValueError, match="too large"):
        scales_written(torch.tensor([1e39], dtype=torch.float64))


@pytest.mark.parametrize("precision", Precision)
def test_values_take_the_bytes_that_their_precision_says(precision: Precision) -> None:
    values = torch.tensor([0.5, -2.0, 0.0])
    assert precision.written(values).numel() == 3 * precision.n_bytes
    assert torch.equal(precision.read(precision.written(values)), values)
