"""The generator against its published answers, and its bits against their layout, read plainly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.kernels.philox import (
    DITHER_GROUP,
    SIGN_GROUP,
    Stream,
    dither,
    rounds,
    signs,
    uniforms,
    words,
    words_by_coordinate,
)

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_published_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in numbers(counter))
    k0, k1 = numbers(key)
    assert [int(word) for word in rounds((c0, c1, c2, c3), (k0, k1))] == numbers(expected)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 300), st.integers(1, 40))
def test_a_part_is_the_same_as_in_the_whole(key: int, first: int, n_blocks: int) -> None:
    whole = torch.stack(words(key, 7, 0, first + n_blocks))
    assert torch.equal(torch.stack(words(key, 7, first, n_blocks)), whole[:, first:])


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 3), st.data())
def test_dither_takes_the_halves_of_the_words_of_each_lane(key: int, group: int, data: st.DataObject) -> None:
    v, lane = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 15))
    block = words(key, Stream.DITHER, group * 16 + lane, 1)
    expected = (int(block[v // 2]) >> (16 * (v % 2))) & 0xFFFF
    assert int(dither(key, group * DITHER_GROUP, DITHER_GROUP)[v * 16 + lane]) == expected


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 2), st.data())
def test_signs_take_the_bits_of_the_words_of_each_lane(key: int, group: int, data: st.DataObject) -> None:
    v, lane = data.draw(st.integers(0, 127)), data.draw(st.integers(0, 15))
    block = words(key, Stream.SIGNS, group * 16 + lane, 1)
    is_minus = (int(block[v // 32]) >> (v % 32)) & 1
    assert float(signs(key, group * SIGN_GROUP, SIGN_GROUP)[v * 16 + lane]) == (-1.0 if is_minus else 1.0)


@given(st.integers(0, 5000))
def test_any_number_of_values_can_be_asked_for(n_values: int) -> None:
    assert torch.equal(dither(3, 0, n_values), dither(3, 0, 5120)[:n_values])
    assert torch.equal(signs(3, 0, n_values), signs(3, 0, 6144)[:n_values])


def test_a_part_begins_with_a_group() -> None:
    with pytest.raises(ValueError, match="must be a multiple of"):
        dither(3, 100, 5)


@given(st.integers(0, 500).map(lambda i: 4 * i), st.integers(0, 500), st.integers(0, (1 << 63) - 1))
def test_a_part_is_the_part_of_the_whole(first: int, n_values: int, key: int) -> None:
    assert torch.equal(uniforms(key, first, n_values), uniforms(key, 0, first + n_values)[first:])


def test_a_coordinate_has_its_word() -> None:
    four = words(3, Stream.MASK, 0, 5)
    found = words_by_coordinate(3, Stream.MASK, 0, 18)
    assert found.tolist() == [int(four[j % 4][j // 4]) for j in range(18)]


def test_they_are_even_between_0_and_1() -> None:
    found = uniforms(1, 0, 1 << 20).double()
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    assert float(found.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / (1 << 20)) ** 0.5)
    assert float(found.var()) == pytest.approx(1 / 12, rel=0.01)


def test_a_part_must_begin_a_block() -> None:
    with pytest.raises(ValueError, match="multiple of 4, not 3"):
        uniforms(1, 3, 5)
