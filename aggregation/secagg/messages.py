"""The messages of secure aggregation as bytes; `docs/reference/secure-aggregation.md` has them with test vectors.

```
AdvertiseKeys       client -> coordinator    its two public keys, signed
  Roster            coordinator -> client    all of them, and the opening that the graph is drawn with
ShareKeys           client -> coordinator    a sealed pair of shares for each neighbour, commitments, signed
  Inbox             coordinator -> client    the clients in U2, and the shares that neighbours sealed for this client
MaskedInput         client -> coordinator    the masked vector, as an update (`masked_input.py`)
  Inputs            coordinator -> client    the clients in the sum (U3)
ConsistencyCheck    client -> coordinator    a signature over U2 and U3
  Agreements        coordinator -> client    the signatures
Unmasking           client -> coordinator    for each neighbour a share of its self mask, or of its key
```

Clients are named by their index: the place of their name in the cohort, in the order of the names. Numbers are
little-endian, and u32 unless stated otherwise. Every list is in ascending order of its indices, each once. Both ends
know each message's length, and it is checked before the message is read. A reader raises `MalformedMessage`.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from umbel.aggregation.secagg.crypto.derive import DIGEST_BYTES, SHARE_COMMITMENT_BYTES, SIGNATURE_BYTES
from umbel.aggregation.secagg.crypto.sealed import SEALED_BYTES
from umbel.aggregation.secagg.crypto.shamir import SHARE_BYTES
from umbel.aggregation.secagg.errors import MalformedMessage

_ADVERT = struct.Struct("<I32s32s64s")
_U32 = struct.Struct("<I")
_SHARE = struct.Struct(f"<I{SHARE_BYTES}s")
_AGREEMENT = struct.Struct(f"<I{SIGNATURE_BYTES}s")
_OWN_BYTES = 2 * SHARE_COMMITMENT_BYTES
_DEALT_BYTES = _OWN_BYTES + SEALED_BYTES

Indices: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdvertiseKeys:
    """A client's public keys. 132 bytes."""

    index: int
    channel_key: bytes  # for sealing shares
    mask_key: bytes  # for masks
    signature: bytes

    @property
    def payload(self) -> bytes:
        """What is signed."""
        return _ADVERT.pack(self.index, self.channel_key, self.mask_key, b"")[:-SIGNATURE_BYTES]

    def encode(self) -> bytes:
        return _ADVERT.pack(self.index, self.channel_key, self.mask_key, self.signature)

    @classmethod
    def decode(cls, data: bytes) -> "AdvertiseKeys":
        _require_length(data, _ADVERT.size, "an AdvertiseKeys message")
        return cls(*_ADVERT.unpack(data))


@dataclass(frozen=True, slots=True)
class Roster:
    """The keys of the clients in U1."""

    opening: bytes  # 32 bytes, the opening of the context's commitment
    adverts: tuple[AdvertiseKeys, ...]

    def encode(self) -> bytes:
        return b"".join((_U32.pack(len(self.adverts)), self.opening, *(one.encode() for one in self.adverts)))

    @classmethod
    def decode(cls, data: bytes, n_cohort: int) -> "Roster":
        n = _count(data, n_cohort, "a roster")
        _require_length(data, _U32.size + DIGEST_BYTES + n * _ADVERT.size, "a roster of this many clients")
        at = _U32.size + DIGEST_BYTES
        adverts = tuple(AdvertiseKeys(*fields) for fields in _ADVERT.iter_unpack(data[at:]))
        _require_ascending([one.index for one in adverts], n_cohort, "a roster")
        return cls(data[_U32.size : at], adverts)


@dataclass(frozen=True, slots=True)
class Dealt:
    """One holder's shares as their dealer publishes them."""

    self_mask_commitment: bytes
    key_commitment: bytes
    sealed: bytes = field(repr=False)  # both shares; empty for the dealer's own

    @property
    def commitments(self) -> tuple[bytes, bytes]:
        """By `ShareKind`."""
        return self.self_mask_commitment, self.key_commitment

    def encode(self) -> bytes:
        return self.self_mask_commitment + self.key_commitment + self.sealed

    @classmethod
    def decode(cls, data: bytes) -> "Dealt":
        first, second = data[:SHARE_COMMITMENT_BYTES], data[SHARE_COMMITMENT_BYTES:_OWN_BYTES]
        return cls(first, second, data[_OWN_BYTES:])


@dataclass(frozen=True, slots=True)
class ShareKeys:
    """A client's shares for its neighbours and itself, in the order of their indices."""

    index: int
    self_mask_commitment: bytes
    dealt: Mapping[int, Dealt]
    signature: bytes

    @property
    def payload(self) -> bytes:
        """What is signed."""
        parts = (one.encode() for _, one in sorted(self.dealt.items()))
        return b"".join((_U32.pack(self.index), self.self_mask_commitment, *parts))

    def encode(self) -> bytes:
        return self.payload + self.signature

    @classmethod
    def decode(cls, data: bytes, index: int, neighbours: Sequence[int]) -> "ShareKeys":
        """`neighbours`: of the client with this index, ascending."""
        _require_length(data, share_keys_bytes(len(neighbours)), "a ShareKeys message of this client")
        if _U32.unpack_from(data)[0] != index:
            raise MalformedMessage("the ShareKeys message names another client as its sender")
        at, dealt = _U32.size + DIGEST_BYTES, dict[int, Dealt]()
        for holder in sorted((*neighbours, index)):
            n_bytes = _OWN_BYTES if holder == index else _DEALT_BYTES
            dealt[holder] = Dealt.decode(data[at : at + n_bytes])
            at += n_bytes
        return cls(index, data[_U32.size : _U32.size + DIGEST_BYTES], dealt, data[at:])


def share_keys_bytes(n_neighbours: int) -> int:
    return _U32.size + DIGEST_BYTES + n_neighbours * _DEALT_BYTES + _OWN_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True, slots=True)
class Inbox:
    """The clients in U2, and the shares that this client's neighbours dealt to it."""

    shared: Indices
    dealt: Mapping[int, Dealt]

    def encode(self) -> bytes:
        return encode_indices(self.shared) + b"".join(one.encode() for _, one in sorted(self.dealt.items()))

    @classmethod
    def decode(cls, data: bytes, n_cohort: int, neighbours: Sequence[int]) -> "Inbox":
        """`neighbours`: of the client whose inbox it is."""
        n = _count(data, n_cohort, "an inbox")
        at = _U32.size * (n + 1)
        if len(data) < at:
            raise MalformedMessage("the inbox ends in the middle of its list of clients")
        shared = decode_indices(data[:at], n_cohort)
        dealers = sorted(set(shared).intersection(neighbours))
        _require_length(data, at + len(dealers) * _DEALT_BYTES, "an inbox with this many dealers")
        pieces = (data[first : first + _DEALT_BYTES] for first in range(at, len(data), _DEALT_BYTES))
        return cls(shared, {dealer: Dealt.decode(piece) for dealer, piece in zip(dealers, pieces, strict=True)})


def encode_indices(indices: Iterable[int]) -> bytes:
    """A set of clients: the message `Inputs`, and a part of other messages."""
    listed = sorted(indices)
    return struct.pack(f"<I{len(listed)}I", len(listed), *listed)


def decode_indices(data: bytes, n_cohort: int) -> Indices:
    """The clients of a set, ascending."""
    n = _count(data, n_cohort, "a set of clients")
    _require_length(data, _U32.size * (n + 1), "a set of this many clients")
    indices = struct.unpack_from(f"<{n}I", data, _U32.size)
    _require_ascending(indices, n_cohort, "a set of clients")
    return indices


def encode_agreements(signatures: Mapping[int, bytes]) -> bytes:
    """The signatures over U2 and U3, by client."""
    parts = (_AGREEMENT.pack(index, signature) for index, signature in sorted(signatures.items()))
    return b"".join((_U32.pack(len(signatures)), *parts))


def decode_agreements(data: bytes, n_cohort: int) -> dict[int, bytes]:
    n = _count(data, n_cohort, "a list of signatures")
    _require_length(data, _U32.size + n * _AGREEMENT.size, "a list of this many signatures")
    pairs: list[tuple[int, bytes]] = list(_AGREEMENT.iter_unpack(data[_U32.size :]))
    _require_ascending([index for index, _ in pairs], n_cohort, "a list of signatures")
    return dict(pairs)


@dataclass(frozen=True, slots=True)
class Unmasking:
    """The shares that a client reveals, by dealer: of its self mask if it is in the sum, otherwise of its key."""

    index: int
    shares: Mapping[int, bytes] = field(repr=False)

    def encode(self) -> bytes:
        parts = (_SHARE.pack(dealer, share) for dealer, share in sorted(self.shares.items()))
        return b"".join((struct.pack("<II", self.index, len(self.shares)), *parts))

    @classmethod
    def decode(cls, data: bytes, index: int, n_cohort: int) -> "Unmasking":
        if len(data) < 2 * _U32.size:
            raise MalformedMessage(f"an Unmasking message must have at least {2 * _U32.size} bytes, not {len(data)}")
        found, n = struct.unpack_from("<II", data)
        if found != index:
            raise MalformedMessage("the Unmasking message names another client as its sender")
        if n > n_cohort:
            raise MalformedMessage(
                f"an Unmasking message states {n} shares, but the cohort has only {n_cohort} clients"
            )
        _require_length(data, 2 * _U32.size + n * _SHARE.size, "an Unmasking message of this many shares")
        pairs: list[tuple[int, bytes]] = list(_SHARE.iter_unpack(data[2 * _U32.size :]))
        _require_ascending([dealer for dealer, _ in pairs], n_cohort, "an Unmasking message")
        return cls(index, dict(pairs))


def _count(data: bytes, most: int, what: str) -> int:
    """The count at the beginning of a list."""
    if len(data) < _U32.size:
        raise MalformedMessage(f"{what} must begin with a count of {_U32.size} bytes; only {len(data)} arrived")
    n: int = _U32.unpack_from(data)[0]
    if n > most:
        raise MalformedMessage(f"{what} states {n} entries, but the cohort has only {most} clients")
    return n


def _require_length(data: bytes, n_bytes: int, what: str) -> None:
    if len(data) != n_bytes:
        raise MalformedMessage(f"{what} must have {n_bytes} bytes, not {len(data)}")


def _require_ascending(indices: Sequence[int], n_cohort: int, what: str) -> None:
    if any(after <= before for before, after in pairwise(indices)):
        raise MalformedMessage(f"{what} must list its clients in ascending order, each once")
    if indices and indices[-1] >= n_cohort:
        raise MalformedMessage(
            f"{what} lists client {indices[-1]}, but the cohort has {n_cohort} clients, numbered from 0"
        )
