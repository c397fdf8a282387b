"""Keys, digests and commitments: by bytes written out here, and that each input changes them."""

import hashlib
import hmac
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.secagg.published import DERIVATIONS, Derivation
from umbel.aggregation.secagg.crypto.derive import (
    ShareKind,
    Vector,
    channel_key,
    pair_mask_key,
    require_self_mask,
    require_share,
    self_mask_commitment,
    self_mask_key,
    session_digest,
    set_digest,
    share_commitment,
    u32,
)
from umbel.aggregation.secagg.errors import BadSelfMask, BadShare

SHARED = bytes(range(32))
SESSION = bytes(range(32, 64))
CONTEXT = bytes(range(64, 96))
SHARE = bytes(range(100, 133))
ROSTER = tuple(
    (index, bytes([index]) * 32, bytes([100 + index]) * 32, bytes([200 + index]) * 64) for index in (0, 2, 5)
)

indices = st.integers(0, (1 << 32) - 1)


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for 32 bytes: one block of expansion."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\1", "sha256")


@pytest.mark.parametrize("case", DERIVATIONS, ids=lambda case: case.name)
def test_the_library_derives_as_rfc_5869(case: Derivation) -> None:
    key = bytes.fromhex(case.key)
    assert HKDF(SHA256(), len(key), case.salt, case.info).derive(case.secret) == key
    assert hkdf(case.secret, case.salt, case.info) == key[:32]


@given(indices, indices)
def test_the_bytes_of_a_channel_key(sender: int, receiver: int) -> None:
    info = b"umbel-secagg/1 channel" + u32(sender) + u32(receiver)
    assert channel_key(SHARED, SESSION, sender, receiver) == hkdf(SHARED, SESSION, info)


@pytest.mark.parametrize(("vector", "name"), [(Vector.LEVELS, b"levels"), (Vector.WORDS, b"words")])
def test_the_bytes_of_mask_keys(vector: Vector, name: bytes) -> None:
    pair = hkdf(SHARED, SESSION, b"umbel-secagg/1 mask " + name + b"\3\0\0\0\1\2\0\0")
    assert pair_mask_key(SHARED, SESSION, vector, 3, 513) == pair
    assert pair_mask_key(SHARED, SESSION, vector, 513, 3) == pair
    own = hkdf(SHARED, SESSION, b"umbel-secagg/1 self " + name + b"\1\2\0\0")
    assert self_mask_key(SHARED, SESSION, vector, 513) == own


@given(indices, indices)
def test_the_two_directions_of_a_channel_have_different_keys(one: int, other: int) -> None:
    there, back = channel_key(SHARED, SESSION, one, other), channel_key(SHARED, SESSION, other, one)
    assert (there == back) == (one == other)


def test_every_key_of_a_session_is_another_and_each_session_has_others() -> None:
    def keys(session: bytes) -> list[bytes]:
        return [
            *(channel_key(SHARED, session, one, other) for one in range(4) for other in range(4)),
            *(
                pair_mask_key(SHARED, session, vector, one, other)
                for vector in Vector
                for one in range(4)
                for other in range(one)
            ),
            *(self_mask_key(SHARED, session, vector, one) for vector in Vector for one in range(4)),
        ]

    both = keys(SESSION) + keys(CONTEXT)
    assert len(set(both)) == len(both) == 2 * (16 + 12 + 8)
    assert {len(key) for key in both} == {32}


def test_a_client_shares_no_mask_with_itself() -> None:
    with pytest.raises(ValueError, match="needs two different clients, not client 7 twice"):
        pair_mask_key(SHARED, SESSION, Vector.WORDS, 7, 7)


def test_the_bytes_of_a_session_digest() -> None:
    text = b"umbel-secagg/1 session" + CONTEXT + b"\3\0\0\0"
    for index in (0, 2, 5):
        text += bytes([index, 0, 0, 0]) + bytes([index] * 32 + [100 + index] * 32 + [200 + index] * 64)
    text += b"\2\0\0\0\3\0\0\0"
    assert session_digest(CONTEXT, ROSTER, 2, 3) == hashlib.sha256(text).digest()
    assert session_digest(CONTEXT, iter(ROSTER), 2, 3) == hashlib.sha256(text).digest()


@given(st.integers(0, 8 * (32 + 3 * 132 + 8) - 1))
def test_a_session_digest_differs_if_one_bit_of_anything_does(bit: int) -> None:
    """Of the context, of an index, a key or a signature of anybody, of the degree or the threshold."""
    fields = [CONTEXT, *(part for row in ROSTER for part in (u32(row[0]), *row[1:])), u32(2), u32(3)]
    text = (int.from_bytes(b"".join(fields), "little") ^ 1 << bit).to_bytes(32 + 3 * 132 + 8, "little")
    changed = list[bytes]()
    for part in fields:
        changed.append(text[: len(part)])
        text = text[len(part) :]
    context, rows, (degree, threshold) = changed[0], changed[1:-2], changed[-2:]
    roster = [
        (int.from_bytes(rows[at], "little"), rows[at + 1], rows[at + 2], rows[at + 3]) for at in range(0, len(rows), 4)
    ]
    degrees = int.from_bytes(degree, "little"), int.from_bytes(threshold, "little")
    if [index for index, *_ in roster] != sorted({index for index, *_ in roster}):
        with pytest.raises(ValueError, match="in ascending order, each once"):
            session_digest(context, roster, *degrees)
    else:
        assert session_digest(context, roster, *degrees) != session_digest(CONTEXT, ROSTER, 2, 3)


@pytest.mark.parametrize(
    "roster",
    [
        ROSTER[:2],
        ROSTER[1:],
        (),
        (*ROSTER, (6, *ROSTER[0][1:])),
        ((0, ROSTER[0][2], ROSTER[0][1], ROSTER[0][3]), *ROSTER[1:]),
    ],
    ids=["one less", "another less", "none", "one more", "keys swapped"],
)
def test_a_session_digest_differs_with_the_roster(roster: tuple[tuple[int, bytes, bytes, bytes], ...]) -> None:
    assert session_digest(CONTEXT, roster, 2, 3) != session_digest(CONTEXT, ROSTER, 2, 3)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((6, b"\1" * 31, b"\2" * 32, b"\3" * 64), "channel key must have 32 bytes, not 31"),
        ((6, b"\1" * 32, b"\2" * 33, b"\3" * 64), "mask key must have 32 bytes, not 33"),
        ((6, b"\1" * 32, b"\2" * 32, b"\3" * 63), "signature must have 64 bytes, not 63"),
        ((5, b"\1" * 32, b"\2" * 32, b"\3" * 64), "in ascending order, each once"),
        ((1, b"\1" * 32, b"\2" * 32, b"\3" * 64), "in ascending order, each once"),
        ((1 << 32, b"\1" * 32, b"\2" * 32, b"\3" * 64), "32 bits"),
    ],
)
def test_a_roster_of_another_form_has_no_digest(row: tuple[int, bytes, bytes, bytes], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        session_digest(CONTEXT, (*ROSTER, row), 2, 3)


def test_the_bytes_of_a_set_digest_whose_order_does_not_matter() -> None:
    text = b"umbel-secagg/1 set" + SESSION + b"\3\0\0\0" + b"\0\0\0\0" + b"\2\0\0\0" + b"\0\1\0\0"
    for members in ([0, 2, 256], [256, 0, 2], {0, 2, 256}):
        assert set_digest(SESSION, members) == hashlib.sha256(text).digest()
    with pytest.raises(ValueError, match="each once"):
        set_digest(SESSION, [0, 2, 2])


@given(st.sets(indices, max_size=6), st.sets(indices, max_size=6))
def test_two_sets_have_one_digest_only_if_they_are_one(one: set[int], other: set[int]) -> None:
    assert (set_digest(SESSION, one) == set_digest(SESSION, other)) == (one == other)


def test_the_bytes_of_a_share_s_commitment() -> None:
    for kind, byte in ((ShareKind.SELF_MASK, b"\0"), (ShareKind.MASK_KEY, b"\1")):
        text = b"umbel-secagg/1 share" + SESSION + byte + b"\4\0\0\0" + b"\7\0\0\0" + SHARE
        assert share_commitment(SESSION, kind, 4, 7, SHARE) == hashlib.sha256(text).digest()[:16]


def test_the_bytes_of_a_self_mask_s_commitment() -> None:
    text = b"umbel-secagg/1 self mask" + SESSION + b"\4\0\0\0" + SHARED
    assert self_mask_commitment(SESSION, 4, SHARED) == hashlib.sha256(text).digest()


@given(st.integers(0, 33 * 8 - 1))
def test_a_share_with_a_flipped_bit_does_not_open_its_commitment(bit: int) -> None:
    commitment = share_commitment(SESSION, ShareKind.MASK_KEY, 4, 7, SHARE)
    flipped = (int.from_bytes(SHARE, "little") ^ 1 << bit).to_bytes(33, "little")
    require_share(commitment, SESSION, ShareKind.MASK_KEY, 4, 7, SHARE)
    with pytest.raises(BadShare, match="does not match the commitment of client 4 for client 7") as caught:
        require_share(commitment, SESSION, ShareKind.MASK_KEY, 4, 7, flipped)
    assert flipped.hex() not in str(caught.value)


def test_a_share_opens_only_the_commitment_of_its_session_kind_dealer_and_holder() -> None:
    commitment = share_commitment(SESSION, ShareKind.MASK_KEY, 4, 7, SHARE)
    for session, kind, dealer, holder in (
        (CONTEXT, ShareKind.MASK_KEY, 4, 7),
        (SESSION, ShareKind.SELF_MASK, 4, 7),
        (SESSION, ShareKind.MASK_KEY, 7, 4),
        (SESSION, ShareKind.MASK_KEY, 4, 8),
        (SESSION, ShareKind.MASK_KEY, 5, 7),
    ):
        with pytest.raises(BadShare):
            require_share(commitment, session, kind, dealer, holder, SHARE)
    for cut in (b"", commitment[:15], commitment + b"\0"):
        with pytest.raises(BadShare):
            require_share(cut, SESSION, ShareKind.MASK_KEY, 4, 7, SHARE)
    for share in (b"", SHARE[:32], SHARE + b"\0"):
        with pytest.raises(BadShare, match="33 bytes"):
            require_share(commitment, SESSION, ShareKind.MASK_KEY, 4, 7, share)


def test_a_self_mask_opens_only_its_commitment() -> None:
    commitment = self_mask_commitment(SESSION, 4, SHARED)
    require_self_mask(commitment, SESSION, 4, SHARED)
    for session, index, secret in (
        (CONTEXT, 4, SHARED),
        (SESSION, 5, SHARED),
        (SESSION, 4, SHARED[::-1]),
        (SESSION, 4, b""),
        (SESSION, 4, SHARED + b"\0"),
    ):
        with pytest.raises(BadSelfMask, match="self mask does not match the commitment") as caught:
            require_self_mask(commitment, session, index, secret)
        assert SHARED.hex() not in str(caught.value)


@pytest.mark.parametrize("n_bytes", [0, 31, 33])
def test_secrets_and_digests_have_32_bytes(n_bytes: int) -> None:
    bad = bytes(n_bytes)
    calls: tuple[Callable[[], bytes], ...] = (
        lambda: channel_key(bad, SESSION, 0, 1),
        lambda: channel_key(SHARED, bad, 0, 1),
        lambda: pair_mask_key(bad, SESSION, Vector.WORDS, 0, 1),
        lambda: self_mask_key(bad, SESSION, Vector.WORDS, 0),
        lambda: session_digest(bad, ROSTER, 2, 3),
        lambda: set_digest(bad, [0]),
        lambda: share_commitment(bad, ShareKind.SELF_MASK, 0, 1, SHARE),
        lambda: self_mask_commitment(bad, 0, SHARED),
        lambda: self_mask_commitment(SESSION, 0, bad),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"must have 32 bytes, not {n_bytes}"):
            call()


@pytest.mark.parametrize("number", [-1, 1 << 32])
def test_an_index_has_32_bits(number: int) -> None:
    calls: tuple[Callable[[], bytes], ...] = (
        lambda: channel_key(SHARED, SESSION, number, 1),
        lambda: channel_key(SHARED, SESSION, 1, number),
        lambda: set_digest(SESSION, [number]),
        lambda: session_digest(CONTEXT, ROSTER, number, 3),
    )
    for call in calls:
        with pytest.raises(ValueError, match="32 bits"):
            call()
