"""Keys, digests and commitments of the protocol, byte for byte; each has its own label.

Keys are HKDF-SHA256 (RFC 5869) with the session digest as salt: two clients that received different rosters, plans or
models derive different keys, and their masks do not cancel. Digests and commitments are SHA-256. Integers are u32,
little-endian. At most one part has a variable length, so no two inputs give the same bytes.
docs/reference/secure-aggregation.md has all of it.

A client's `index` is its place in the cohort, sorted by name, from 0.
"""

import hashlib
import hmac
import struct
from collections.abc import Collection, Iterable
from enum import IntEnum, StrEnum
from itertools import pairwise

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from umbel.aggregation.secagg.crypto.curve import KEY_BYTES
from umbel.aggregation.secagg.crypto.shamir import SECRET_BYTES, SHARE_BYTES
from umbel.aggregation.secagg.errors import BadSelfMask, BadShare

PROTOCOL = b"umbel-secagg/1 "
DIGEST_BYTES = 32
DERIVED_BYTES = 32
SIGNATURE_BYTES = 64
SHARE_COMMITMENT_BYTES = 16

_INDEX_MAX = (1 << 32) - 1


class Vector(StrEnum):
    """The two vectors that a client masks."""

    LEVELS = "levels"
    WORDS = "words"


class ShareKind(IntEnum):
    """What a share is of: the dealer's self mask (b), or the seed of its mask key (s)."""

    SELF_MASK = 0
    MASK_KEY = 1


# --- keys -------------------------------------------------------------------------------------------------------------


def channel_key(shared: bytes, session: bytes, sender: int, receiver: int) -> bytes:
    """The key of the one message from `sender` to `receiver`: 32 bytes. The other direction has another key.

    `shared`: the X25519 secret of their channel keys (`curve.py`). Raises `ValueError`.
    """
    return _derive(shared, session, b"channel", u32(sender) + u32(receiver))


def pair_mask_key(shared: bytes, session: bytes, vector: Vector, one: int, other: int) -> bytes:
    """The key, 32 bytes, of the mask of `vector` that one of the two clients adds and the other subtracts.

    `shared`: the X25519 secret of their mask keys (`curve.py`). Raises `ValueError`.
    """
    if one == other:
        raise ValueError(f"a shared mask needs two different clients, not client {one} twice")
    return _derive(shared, session, b"mask " + vector.encode(), u32(min(one, other)) + u32(max(one, other)))


def self_mask_key(secret: bytes, session: bytes, vector: Vector, index: int) -> bytes:
    """The key, 32 bytes, of the mask that only `index` has, from its secret b. Raises `ValueError`."""
    return _derive(secret, session, b"self " + vector.encode(), u32(index))


def relay_key(shared: bytes, session: bytes, index: int, sender: bytes, receiver: bytes) -> bytes:
    """The key, 32 bytes, of one message of client `index` that one coordinator process relays to another.

    `shared`: the X25519 secret of the keys `sender` and `receiver` (public, 32 bytes each). Raises `ValueError`.
    """
    for key in (sender, receiver):
        _require_length(key, KEY_BYTES, "a public key")
    return _derive(shared, session, b"relay", u32(index) + sender + receiver)


def dither_key(secret: bytes) -> bytes:
    """The key of a client's own dither (`contribution.py`), from the secret of its contribution: 32 bytes."""
    return hashlib.sha256(PROTOCOL + b"dither" + secret).digest()


def word_dither_key(secret: bytes) -> bytes:
    """The key of the dither of a client's words, from the secret of its contribution: 32 bytes."""
    return hashlib.sha256(PROTOCOL + b"word dither" + secret).digest()


def _derive(secret: bytes, session: bytes, purpose: bytes, indices: bytes) -> bytes:
    _require_length(secret, SECRET_BYTES, "a secret")
    _require_length(session, DIGEST_BYTES, "a session digest")
    return HKDF(SHA256(), DERIVED_BYTES, salt=session, info=PROTOCOL + purpose + indices).derive(secret)


# --- digests ----------------------------------------------------------------------------------------------------------


def session_digest(
    context: bytes, roster: Iterable[tuple[int, bytes, bytes, bytes]], degree: int, threshold: int
) -> bytes:
    """The digest of all that an attempt's clients must agree on: the context, the clients' keys, and the graph.

    `roster`: of each client, by index, its index, its channel key and mask key (32 bytes each) and its signature over
    them (64). `degree`: neighbours of each. Raises `ValueError` for other lengths or another order.
    """
    _require_length(context, DIGEST_BYTES, "a context digest")
    rows = tuple(roster)
    _require_ascending([index for index, _, _, _ in rows])
    sha = hashlib.sha256(PROTOCOL + b"session" + context + u32(len(rows)))
    for index, channel, mask, signature in rows:
        _require_length(channel, KEY_BYTES, "a channel key")
        _require_length(mask, KEY_BYTES, "a mask key")
        _require_length(signature, SIGNATURE_BYTES, "a signature")
        sha.update(u32(index) + channel + mask + signature)
    sha.update(u32(degree) + u32(threshold))
    return sha.digest()


def set_digest(session: bytes, indices: Collection[int]) -> bytes:
    """The digest of a set of clients of this session, in any order. Raises `ValueError` for a repeated one."""
    _require_length(session, DIGEST_BYTES, "a session digest")
    members = sorted(indices)
    _require_ascending(members)
    for end in members[:1] + members[-1:]:
        u32(end)  # checks the range of all
    packed = struct.pack(f"<{len(members)}I", *members)
    return hashlib.sha256(PROTOCOL + b"set" + session + u32(len(members)) + packed).digest()


# --- commitments ------------------------------------------------------------------------------------------------------


def share_commitment(session: bytes, kind: ShareKind, dealer: int, holder: int, share: bytes) -> bytes:
    """The dealer's commitment to the share of `holder`: 16 bytes. Raises `ValueError`.

    It hides the share, which has 257 secret bits. To find two shares with the same commitment, a dealer must compute
    2^64 hashes. All that it gains is that it and the holder can spoil an attempt without blame.
    """
    _require_length(session, DIGEST_BYTES, "a session digest")
    _require_length(share, SHARE_BYTES, "a share")
    parts = (PROTOCOL, b"share", session, bytes([kind]), u32(dealer), u32(holder), share)
    return hashlib.sha256(b"".join(parts)).digest()[:SHARE_COMMITMENT_BYTES]


def require_share(commitment: bytes, session: bytes, kind: ShareKind, dealer: int, holder: int, share: bytes) -> None:
    """Raise `BadShare` unless this is the share that `dealer` has committed to."""
    if len(share) != SHARE_BYTES:
        raise BadShare(f"a share must have {SHARE_BYTES} bytes, not {len(share)}")
    if not hmac.compare_digest(commitment, share_commitment(session, kind, dealer, holder, share)):
        raise BadShare(f"the share does not match the commitment of client {dealer} for client {holder}")


def self_mask_commitment(session: bytes, index: int, secret: bytes) -> bytes:
    """A client's commitment to its self mask's secret b: 32 bytes. Raises `ValueError`."""
    _require_length(session, DIGEST_BYTES, "a session digest")
    _require_length(secret, SECRET_BYTES, "a secret")
    return hashlib.sha256(PROTOCOL + b"self mask" + session + u32(index) + secret).digest()


def require_self_mask(commitment: bytes, session: bytes, index: int, secret: bytes) -> None:
    """Raise `BadSelfMask` unless this is the secret b that client `index` has committed to."""
    if len(secret) != SECRET_BYTES or not hmac.compare_digest(commitment, self_mask_commitment(session, index, secret)):
        raise BadSelfMask(f"the self mask does not match the commitment of client {index}")


# --- bytes ------------------------------------------------------------------------------------------------------------


def u32(number: int) -> bytes:
    """An index or a count: 4 bytes, little-endian. Raises `ValueError`."""
    if not 0 <= number <= _INDEX_MAX:
        raise ValueError(f"{number} is not an unsigned integer of 32 bits")
    return number.to_bytes(4, "little")


def _require_length(value: bytes, n_bytes: int, what: str) -> None:
    if len(value) != n_bytes:
        raise ValueError(f"{what} must have {n_bytes} bytes, not {len(value)}")


def _require_ascending(indices: Iterable[int]) -> None:
    if any(before >= after for before, after in pairwise(indices)):
        raise ValueError("the clients' indices must be in ascending order, each once")
