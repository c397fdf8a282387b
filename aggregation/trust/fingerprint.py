"""Fingerprints: what two people compare, by phone or on paper, to know that they mean the same key or the same list.

A key's fingerprint has 128 bits. To pass off a key as another's, an attacker must find one with that key's fingerprint,
which takes some 2^128 tries. Two keys of the attacker's own with one fingerprint take 2^64 tries, but gain nothing. The
author of a member list could prepare a second list with the same short fingerprint in 2^64 tries. So people compare all
256 bits of a list's SHA-256.
"""

import hashlib

from umbel.aggregation.types import require_sha256

_PURPOSE = b"umbel key fingerprint 1\n"
_KEY_BYTES = 16
_GROUP = 4
_SHORT = 4 * _GROUP


def fingerprint(key: bytes) -> str:
    """The fingerprint of a public key (32 raw bytes): eight groups of four hex digits, such as `7F3A 91C2 ...`."""
    return grouped(hashlib.sha256(_PURPOSE + key).digest()[:_KEY_BYTES].hex())


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
