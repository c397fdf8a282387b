"""Check-ins are verified by libsodium: as OpenSSL does, for everybody who does not hold the key."""

import hashlib

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from umbel.server.http.auth import libsodium_check

# RFC 8032, section 7.1, test 2: secret key, public key, message, signature.
SECRET = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point
SMALL_ORDER = bytes(32), (1).to_bytes(32, "little"), (2**255 - 20).to_bytes(32, "little")


def is_taken(public_key: bytes, signature: bytes, signed: bytes) -> bool:
    try:
        libsodium_check(public_key, signature, signed)
    except InvalidSignature:
        return False
    return True


def openssl_takes(public_key: bytes, signature: bytes, signed: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def test_the_published_signature_is_taken() -> None:
    assert Ed25519PrivateKey.from_private_bytes(SECRET).sign(b"\x72") == SIGNATURE
    libsodium_check(PUBLIC, SIGNATURE, b"\x72")


@given(st.binary(max_size=300), st.integers(0, 511))
def test_what_openssl_signs_is_taken_and_with_one_bit_changed_is_not(signed: bytes, bit: int) -> None:
    signature = Ed25519PrivateKey.from_private_bytes(SECRET).sign(signed)
    libsodium_check(PUBLIC, signature, signed)
    changed = (int.from_bytes(signature, "little") ^ 1 << bit).to_bytes(64, "little")
    assert not is_taken(PUBLIC, changed, signed)
    assert not is_taken(PUBLIC, signature, signed + b"\0")
    assert not is_taken(hashlib.sha256(signed).digest(), signature, signed)


def test_a_signature_in_a_second_form_is_not_taken() -> None:
    """s and s + the order would sign the same."""
    s = int.from_bytes(SIGNATURE[32:], "little") + ORDER
    second = SIGNATURE[:32] + s.to_bytes(32, "little")
    assert not is_taken(PUBLIC, second, b"\x72")
    assert not openssl_takes(PUBLIC, second, b"\x72")


@pytest.mark.parametrize("key", SMALL_ORDER)
def test_a_key_with_which_everybody_has_signed_everything_is_not_taken(key: bytes) -> None:
    identity = (1).to_bytes(32, "little")
    assert not is_taken(key, identity + bytes(32), b"anything")


@pytest.mark.parametrize(("key", "signature"), [(PUBLIC[:31], SIGNATURE), (PUBLIC, SIGNATURE[:63])])
def test_a_key_or_a_signature_of_another_length_is_refused(key: bytes, signature: bytes) -> None:
    with pytest.raises((ValueError, InvalidSignature)):
        libsodium_check(key, signature, b"\x72")
