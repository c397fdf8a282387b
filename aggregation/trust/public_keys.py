"""Ed25519 public keys: one spelling for each point, no point of small order, and fingerprints for people to compare.

A key's fingerprint has 128 bits. To pass off a key as another's, an attacker must find one with that key's fingerprint,
which takes some 2^128 tries. Two keys of the attacker's own with one fingerprint take 2^64 tries, but gain nothing. The
author of a member list could prepare a second list with the same short fingerprint in 2^64 tries. So people compare all
256 bits of a list's SHA-256.
"""

import base64
import binascii
import hashlib

from umbel.aggregation.types import require_sha256

KEY_BYTES = 32

# The eight points of small order on edwards25519, by their y (the sign bit chooses between x and -x). For such a "key"
# one constant signature fits many messages. Chalkias, Garillot, Nikolaenko, "Taming the many EdDSAs" (2020), table 1;
# with y below the prime (RFC 8032, 5.1.3) each has just these encodings.
_FIELD_PRIME = (1 << 255) - 19
_SMALL_ORDER_Y = frozenset(
    (
        1,  # the identity
        _FIELD_PRIME - 1,  # order 2
        0,  # order 4, two points
        0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,  # order 8, two points
        0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,  # order 8, two points
    )
)


def require_public_key(raw: bytes, what: str = "public_key") -> None:
    """Raise `ValueError` unless `raw` can be an Ed25519 public key that was made from a private key."""
    if len(raw) != KEY_BYTES:
        raise ValueError(f"{what} must be an Ed25519 key of {KEY_BYTES} raw bytes, in base64; it has {len(raw)} bytes")
    y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
    if y >= _FIELD_PRIME or y in _SMALL_ORDER_Y:
        raise ValueError(f"{what} is a public key that has no private key; make a key pair with an Ed25519 library")


def public_key_bytes(text: str, what: str = "public_key") -> bytes:
    """The 32 bytes of a key in base64. Raises `ValueError` for any other text, and as `require_public_key` does."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{what} must be base64") from error
    require_public_key(raw, what)
    return raw


def public_key_text(raw: bytes) -> str:
    """A key in the one spelling that comparisons rely on: base64 of its 32 bytes."""
    return base64.b64encode(raw).decode()


_PURPOSE = b"umbel key fingerprint 1\n"
_FINGERPRINT_BYTES = 16
_GROUP = 4
_SHORT = 4 * _GROUP


def fingerprint(key: bytes) -> str:
    """The fingerprint of a public key (32 raw bytes): eight groups of four hex digits, such as `7F3A 91C2 ...`."""
    return grouped(hashlib.sha256(_PURPOSE + key).digest()[:_FINGERPRINT_BYTES].hex())


def grouped(digits: str) -> str:
    """Hex digits for reading aloud: capital, in groups of four. A SHA-256 has sixteen groups."""
    return " ".join(digits[first : first + _GROUP] for first in range(0, len(digits), _GROUP)).upper()


def short_groups(digits: str) -> str:
    """The first four groups of a hash, to name one list in a sentence. They are too few to trust a list by."""
    return grouped(digits[:_SHORT])


def sha256_of_groups(text: str) -> str:
    """A SHA-256 in lower-case digits, from digits or groups. Raises `ValueError` for any other text."""
    digits = "".join(text.split()).lower()
    require_sha256(digits, "the SHA-256")
    return digits


def members_sha256_of(text: str) -> str:
    """`sha256_of_groups` for `members_sha256` in a file, which may be in groups, as `umbel members show` prints it."""
    try:
        return sha256_of_groups(text)
    except ValueError as error:
        raise ValueError("members_sha256 must be the 64 hex digits that `umbel members show` prints") from error
