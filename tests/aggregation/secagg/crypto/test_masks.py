"""Masks are the keystream of the standard, whatever the lanes and the parts; they wrap, and they leave no trace."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.masked_input import lane_dtype

DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LANES = st.sampled_from(list(DTYPES))
FIRSTS = st.one_of(st.integers(0, 70_000), st.integers(1 << 40, 1 << 90))
SIGNS = st.lists(st.sampled_from([1, -1]), max_size=5)


def key(number: int) -> bytes:
    return sha256(b"mask %d" % number).digest()


def keys(signs: list[int]) -> list[bytes]:
    return [key(i) for i in range(len(signs))]


def vector(n_lanes: int, width: int, seed: int = 1) -> Tensor:
    """Integers of the whole range."""
    lanes = np.random.default_rng(seed).integers(0, 256, n_lanes * width, np.uint8).view(f"i{width}")
    return torch.from_numpy(lanes)


def keystream(one: bytes, first: int, n_bytes: int) -> bytes:
    """The plain way: counters, one by one, through the block cipher."""
    blocks = range(first // 16, (first + n_bytes) // 16 + 1)
    made = Cipher(AES256(one), ECB()).encryptor().update(b"".join(block.to_bytes(16, "big") for block in blocks))
    return made[first % 16 :][:n_bytes]


def masked_plainly(plain: Tensor, signs: list[int], first: int) -> list[int]:
    """Lane by lane in Python's integers."""
    width = plain.element_size()
    sums = [int(lane) for lane in plain]
    for one, sign in zip(keys(signs), signs, strict=True):
        stream = keystream(one, first * width, plain.numel() * width)
        for i in range(len(sums)):
            sums[i] += sign * int.from_bytes(stream[i * width : (i + 1) * width], "little")
    half = 1 << (8 * width - 1)
    return [(lane + half) % (2 * half) - half for lane in sums]


# --- what a mask is ---------------------------------------------------------------------------------------------------

# NIST SP 800-38A, F.5.5: the output blocks of CTR-AES256 from its counter on.
SP800_KEY = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
SP800_COUNTER = 0xF0F1F2F3F4F5F6F7F8F9FAFBFCFDFEFF
SP800_PLAINTEXT = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
SP800_CIPHERTEXT = bytes.fromhex(
    "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
)


@pytest.mark.parametrize("width", DTYPES)
def test_a_mask_is_the_keystream_of_sp_800_38a(width: int) -> None:
    lanes = torch.zeros(64 // width, dtype=DTYPES[width])
    Masks([SP800_KEY], [1]).apply(lanes, SP800_COUNTER * 16 // width)
    expected = bytes(a ^ b for a, b in zip(SP800_PLAINTEXT, SP800_CIPHERTEXT, strict=True))
    found = b"".join(int(lane).to_bytes(width, "little", signed=True) for lane in lanes)
    assert found == expected


@given(LANES, st.integers(0, 60), FIRSTS, SIGNS, st.integers(0, 99))
@settings(deadline=None)
def test_lanes_of_every_width_are_those_of_plain_integers(
    width: int, n_lanes: int, first: int, signs: list[int], seed: int
) -> None:
    lanes = vector(n_lanes, width, seed)
    expected = masked_plainly(lanes, signs, first)
    Masks(keys(signs), signs).apply(lanes, first)
    assert lanes.tolist() == expected


@pytest.mark.parametrize("width", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_lanes_wrap(width: int, sign: int) -> None:
    """From either end of the range: an addition that saturated would show in half of the lanes."""
    info = torch.iinfo(DTYPES[width])
    for end in (info.min, info.max, -1):
        lanes = torch.full((100,), end, dtype=DTYPES[width])
        expected = masked_plainly(lanes, [sign], 0)
        Masks([key(0)], [sign]).apply(lanes)
        assert lanes.tolist() == expected


@given(LANES, st.integers(0, 300_000), FIRSTS, SIGNS)
@settings(max_examples=30, deadline=None)
def test_what_was_added_is_taken_off(width: int, n_lanes: int, first: int, signs: list[int]) -> None:
    lanes, plain = vector(n_lanes, width), vector(n_lanes, width)
    Masks(keys(signs), signs).apply(lanes, first)
    Masks(keys(signs), [-sign for sign in signs]).apply(lanes, first)
    assert torch.equal(lanes, plain)


@pytest.mark.parametrize("n_clients", [2, 7])
def test_the_masks_of_pairs_cancel_in_the_sum(n_clients: int) -> None:
    plain = [vector(5000, 4, seed) for seed in range(n_clients)]
    masked = [lanes.clone() for lanes in plain]
    for u in range(n_clients):
        others = [v for v in range(n_clients) if v != u]
        pairs = [key(min(u, v) * n_clients + max(u, v)) for v in others]
        Masks(pairs, [1 if v > u else -1 for v in others]).apply(masked[u])
        assert not torch.equal(masked[u], plain[u])
    assert torch.equal(torch.stack(masked).sum(0, dtype=torch.int32), torch.stack(plain).sum(0, dtype=torch.int32))


# --- parts ------------------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Consecutive parts of a vector, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    return list(zip([0, *places], [*places, length], strict=True))


@given(st.data(), LANES, st.sampled_from([0, 1, 999, 40_000, 300_001]), FIRSTS)
@settings(max_examples=60, deadline=None)
def test_parts_in_any_order_are_the_whole(data: st.DataObject, width: int, n_lanes: int, first: int) -> None:
    """In order the keystreams go on; out of order, and again, they are set up where the part begins."""
    signs = [1, -1, 1]
    whole, by_parts = vector(n_lanes, width), vector(n_lanes, width)
    Masks(keys(signs), signs).apply(whole, first)
    parts = data.draw(cuts(n_lanes))
    if data.draw(st.booleans()):
        parts = data.draw(st.permutations(parts))
    masks = Masks(keys(signs), signs)
    for start, stop in parts:
        masks.apply(by_parts[start:stop], first + start)
    assert torch.equal(by_parts, whole)


def test_a_part_of_other_lanes_begins_at_its_own_byte() -> None:
    """Ten lanes of 4 bytes end at byte 40; lane 10 of 2 bytes begins at byte 20."""
    masks, narrow = Masks([key(0)], [1]), torch.zeros(10, dtype=torch.int16)
    masks.apply(torch.zeros(10, dtype=torch.int32))
    masks.apply(narrow, 10)
    assert narrow.tolist() == masked_plainly(torch.zeros(10, dtype=torch.int16), [1], 10)


# --- what masked numbers tell -----------------------------------------------------------------------------------------


def masked_zeros(one: bytes, n_bytes: int) -> NDArray[np.uint8]:
    lanes = torch.zeros(n_bytes // 4, dtype=torch.int32)
    Masks([one], [1]).apply(lanes)
    return lanes.numpy().view(np.uint8)


@pytest.mark.parametrize("number", range(4))
def test_a_masked_zero_vector_is_uniform_in_its_bytes(number: int) -> None:
    """Chi-square of 255 degrees of freedom: 255 with a deviation of 22.6. Six of them."""
    counts = np.bincount(masked_zeros(key(number), 1 << 20), minlength=256)
    expected = (1 << 20) / 256
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 6 * 22.6


@pytest.mark.parametrize("other", ["another key", "one bit of the key"])
def test_the_masks_of_two_keys_are_unlike(other: str) -> None:
    second = key(1) if other == "another key" else bytes([key(0)[0] ^ 1]) + key(0)[1:]
    ours, theirs = (masked_zeros(one, 1 << 20).astype(np.float64) for one in (key(0), second))
    assert abs(float(np.corrcoef(ours, theirs)[0, 1])) < 6 / 1024  # of n values: 1 / sqrt(n)
    assert abs(float(np.corrcoef(ours[:-1], theirs[1:])[0, 1])) < 6 / 1024


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"a mask's key must have 32 bytes, not {length}"):
        Masks([key(0), bytes(length)], [1, 1])


def test_signs_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="2 keys and 1 signs"):
        Masks([key(0), key(1)], [1])
    with pytest.raises(ValueError, match=r"must be 1 .* or -1 .*, not 0"):
        Masks([key(0)], [0])


def test_vectors_that_are_no_lanes_are_refused_and_left_alone() -> None:
    masks, lanes = Masks([key(0)], [1]), torch.zeros(20, dtype=torch.int32)
    for dtype in (torch.float32, torch.uint8, torch.bool):
        with pytest.raises(TypeError, match="masks can be added to int8, int16, int32 or int64, not to torch"):
            masks.apply(lanes.to(dtype))
    for other in (lanes[::2], lanes.view(4, 5), lanes.view(4, 5).T):
        with pytest.raises(ValueError, match="contiguous vector of one dimension"):
            masks.apply(other)
    with pytest.raises(ValueError, match="the vector is on meta"):
        masks.apply(torch.zeros(20, dtype=torch.int32, device="meta"))
    assert not lanes.any()


@pytest.mark.parametrize("first", [-1, (1 << 130) - 19])
def test_places_that_a_keystream_has_not_are_refused(first: int) -> None:
    lanes = torch.zeros(20, dtype=torch.int32)
    with pytest.raises(ValueError, match="too short for 20 lanes from"):
        Masks([key(0)], [1]).apply(lanes, first)
    assert not lanes.any()


def test_a_repr_tells_no_key() -> None:
    masks = Masks([key(0)], [1])
    masks.apply(torch.zeros(20, dtype=torch.int32))
    assert key(0).hex() not in repr(masks)
    assert repr(key(0)) not in repr(masks)


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        (1, torch.int8),
        (8, torch.int8),
        (9, torch.int16),
        (16, torch.int16),
        (17, torch.int32),
        (32, torch.int32),
        (33, torch.int64),
        (64, torch.int64),
    ],
    ids=str,
)
def test_the_narrowest_lanes_that_hold_it_are_taken(bits: int, dtype: torch.dtype) -> None:
    assert lane_dtype(bits) == dtype


@pytest.mark.parametrize("bits", [0, 65])
def test_integers_that_no_lane_holds_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"of 1 to 64 bits, not {bits}"):
        lane_dtype(bits)
