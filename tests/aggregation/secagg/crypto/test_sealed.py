"""Sealed shares: opened by their holder alone, as they were sealed, or not at all."""

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.derive import channel_key, u32
from umbel.aggregation.secagg.crypto.sealed import SEALED_BYTES, open_sealed, seal
from umbel.aggregation.secagg.crypto.shamir import PRIME
from umbel.aggregation.secagg.errors import BadShare

DEALER, HOLDER = KeyPair(b"\1" * 32), KeyPair(b"\2" * 32)
SHARED = DEALER.shared(HOLDER.public)
SESSION = bytes(range(32))
SHARES = (bytes(range(32)) + b"\0", (PRIME - 1).to_bytes(33, "little"))
SEALED = seal(SHARED, SESSION, 3, 8, SHARES)


def test_the_holder_opens_what_the_dealer_has_sealed() -> None:
    assert len(SEALED) == SEALED_BYTES == 82
    assert open_sealed(HOLDER.shared(DEALER.public), SESSION, 3, 8, SEALED) == SHARES


def test_the_layout_is_the_documented_one() -> None:
    key = AESGCM(channel_key(SHARED, SESSION, 3, 8))
    assert key.decrypt(bytes(12), SEALED, SESSION + u32(3) + u32(8)) == SHARES[0] + SHARES[1]


@given(st.integers(0, 82 * 8 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    flipped = (int.from_bytes(SEALED, "little") ^ 1 << bit).to_bytes(82, "little")
    with pytest.raises(BadShare, match="client 3 for client 8") as caught:
        open_sealed(SHARED, SESSION, 3, 8, flipped)
    assert SHARES[0].hex() not in str(caught.value)


@pytest.mark.parametrize(
    ("session", "dealer", "holder"),
    [(SESSION, 8, 3), (SESSION, 3, 9), (SESSION, 4, 8), (SESSION[::-1], 3, 8)],
    ids=["reflected", "another holder", "another dealer", "another session"],
)
def test_shares_that_were_sealed_elsewhere_are_refused(session: bytes, dealer: int, holder: int) -> None:
    with pytest.raises(BadShare, match="not sealed by"):
        open_sealed(SHARED, session, dealer, holder, SEALED)


def test_nobody_else_opens_them() -> None:
    stranger = KeyPair(b"\3" * 32)
    with pytest.raises(BadShare):
        open_sealed(stranger.shared(DEALER.public), SESSION, 3, 8, SEALED)


@pytest.mark.parametrize("sealed", [b"", SEALED[:81], SEALED + b"\0", SEALED * 1000], ids=len)
def test_another_length_is_refused(sealed: bytes) -> None:
    with pytest.raises(BadShare, match="82 bytes"):
        open_sealed(SHARED, SESSION, 3, 8, sealed)


@pytest.mark.parametrize(
    "bad",
    [bytes(32), bytes(34), PRIME.to_bytes(33, "little"), b"\xff" * 33],
    ids=["short", "long", "prime", "greatest"],
)
@pytest.mark.parametrize("at", [0, 1])
def test_what_is_no_share_is_not_sealed(bad: bytes, at: int) -> None:
    with pytest.raises(BadShare):
        seal(SHARED, SESSION, 3, 8, (bad, SHARES[1]) if at == 0 else (SHARES[0], bad))


@pytest.mark.parametrize("at", [0, 1])
def test_a_dealer_who_seals_what_is_no_share_is_found_out(at: int) -> None:
    text = [*SHARES]
    text[at] = PRIME.to_bytes(33, "little")
    sealed = AESGCM(channel_key(SHARED, SESSION, 3, 8)).encrypt(bytes(12), b"".join(text), SESSION + u32(3) + u32(8))
    with pytest.raises(BadShare, match="below the prime"):
        open_sealed(SHARED, SESSION, 3, 8, sealed)
