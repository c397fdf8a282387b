"""What two people compare, by telephone or on paper, to know that they mean the same key, or the same list.

A key's fingerprint is 128 bits: whoever wants to pass a key of his own for another's must find one with the *given*
fingerprint, some 2^128 tries. That he can find two keys of his own with one fingerprint in some 2^64 gains him nothing:
both are his. A list of members has an author, and whoever wrote one list could prepare a second with the same short
fingerprint in 2^64 tries; so of a list all 256 bits are compared, and they are its SHA-256 itself.
"""

import hashlib

from umbel.aggregation.types import require_sha256

_PURPOSE = b"umbel key fingerprint 1\n"
_KEY_BYTES = 16
_GROUP = 4
_SHORT = 4 * _GROUP


def fingerprint(key: bytes) -> str:
    """Of a public key (32 raw bytes): eight groups of four hex digits, such as `7F3A 91C2 ...`, 128 bits."""
    return grouped(hashlib.sha256(_PURPOSE + key).digest()[:_KEY_BYTES].hex())


def grouped(digits: str) -> str:
    """Hex digits as they are read out: capital, in groups of four. Of a list's SHA-256: sixteen groups."""
    return " ".join(digits[first : first + _GROUP] for first in range(0, len(digits), _GROUP)).upper()


def short_groups(digits: str) -> str:
    """The first four groups of a hash, for sentences: which of several is meant. Too few to trust a list by."""
    return grouped(digits[:_SHORT])


def sha256_of_groups(text: str) -> str:
    """A SHA-256 as file names and comparisons have it, of either spelling. Raises `ValueError` for what is none."""
    digits = "".join(text.split()).lower()
    require_sha256(digits, "the SHA-256")
    return digits


def members_sha256_of(text: str) -> str:
    """The same of a file's `members_sha256`, which may be in groups, as `umbel members show` prints it."""
    try:
        return sha256_of_groups(text)
    except ValueError as error:
        raise ValueError("members_sha256 must be the 64 hex digits that `umbel members show` prints") from error
