"""Signatures of protocol messages: RFC 8032's vectors, and that one counts for one message only."""

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.secagg.published import SIGNATURES, Signature
from umbel.aggregation.secagg.crypto.signing import Label, sign, verify
from umbel.aggregation.secagg.errors import ForgedMessage

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
DIGEST = hashlib.sha256(b"a session").digest()
PAYLOAD = b"\0\0\0\0payload"
SIGNED = sign(KEY, Label.SHARE_KEYS, DIGEST, PAYLOAD)
IDENTITY = (1).to_bytes(32, "little")


@pytest.mark.parametrize("case", SIGNATURES, ids=lambda case: case.name)
def test_the_library_signs_as_rfc_8032_section_7_1(case: Signature) -> None:
    key, message = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(case.private)), bytes.fromhex(case.message)
    assert key.public_key().public_bytes_raw().hex() == case.public
    assert key.sign(message).hex() == case.signature
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(case.public)).verify(bytes.fromhex(case.signature), message)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (Label.ADVERTISE_KEYS, b"umbel-secagg/1 advertise keys"),
        (Label.SHARE_KEYS, b"umbel-secagg/1 share keys"),
        (Label.MASKED_INPUT, b"umbel-secagg/1 masked input"),
        (Label.CONSISTENCY, b"umbel-secagg/1 consistency"),
    ],
)
def test_what_is_signed_is_label_zero_digest_and_the_payload_s_hash(label: Label, text: bytes) -> None:
    signed = text + b"\0" + DIGEST + hashlib.sha256(PAYLOAD).digest()
    signature = sign(KEY, label, DIGEST, PAYLOAD)
    assert signature == KEY.sign(signed)
    verify(PUBLIC, label, DIGEST, PAYLOAD, signature)


def test_a_signature_counts_for_one_label_one_digest_one_payload_and_one_key() -> None:
    stranger = Ed25519PrivateKey.from_private_bytes(b"\1" * 32).public_key().public_bytes_raw()
    verify(PUBLIC, Label.SHARE_KEYS, DIGEST, PAYLOAD, SIGNED)
    for public, label, digest, payload in (
        (stranger, Label.SHARE_KEYS, DIGEST, PAYLOAD),
        *((PUBLIC, label, DIGEST, PAYLOAD) for label in Label if label is not Label.SHARE_KEYS),
        (PUBLIC, Label.SHARE_KEYS, DIGEST[::-1], PAYLOAD),
        (PUBLIC, Label.SHARE_KEYS, DIGEST, PAYLOAD + b"\0"),
    ):
        with pytest.raises(ForgedMessage, match="not signed"):
            verify(public, label, digest, payload, SIGNED)


@given(st.integers(0, 64 * 8 - 1))
def test_every_flipped_bit_of_a_signature_is_seen(bit: int) -> None:
    flipped = (int.from_bytes(SIGNED, "little") ^ 1 << bit).to_bytes(64, "little")
    with pytest.raises(ForgedMessage):
        verify(PUBLIC, Label.SHARE_KEYS, DIGEST, PAYLOAD, flipped)


@pytest.mark.parametrize("signature", [b"", SIGNED[:63], SIGNED + b"\0"], ids=len)
def test_a_signature_of_another_length_is_refused(signature: bytes) -> None:
    with pytest.raises(ForgedMessage, match="64 bytes"):
        verify(PUBLIC, Label.SHARE_KEYS, DIGEST, PAYLOAD, signature)


def test_a_key_of_small_order_signs_nothing() -> None:
    """Of the identity point, R = the identity and s = 0 is a signature of whatever is asked: 8 s B = 8 R + 8 h A."""
    anything = IDENTITY + bytes(32)
    Ed25519PublicKey.from_public_bytes(IDENTITY).verify(anything, b"the library takes it")
    with pytest.raises(ForgedMessage):
        verify(IDENTITY, Label.CONSISTENCY, DIGEST, PAYLOAD, anything)


@pytest.mark.parametrize("public", [b"", PUBLIC[:31], PUBLIC + b"\0", b"\xff" * 32, b"\2" + bytes(31)], ids=bytes.hex)
def test_what_is_no_key_signs_nothing(public: bytes) -> None:
    with pytest.raises(ForgedMessage):
        verify(public, Label.SHARE_KEYS, DIGEST, PAYLOAD, SIGNED)


@pytest.mark.parametrize("n_bytes", [0, 31, 33])
def test_a_digest_of_another_length_is_our_own_mistake(n_bytes: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        sign(KEY, Label.CONSISTENCY, bytes(n_bytes), PAYLOAD)
    with pytest.raises(ValueError, match="32 bytes"):
        verify(PUBLIC, Label.CONSISTENCY, bytes(n_bytes), PAYLOAD, SIGNED)
