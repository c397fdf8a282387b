"""What the clients of a simulated secure round say: in earnest, or as many bytes of it as there would be.

Masks cancel, so nothing but the bytes that travel depends on them. Who says blank messages says its public keys in
earnest, for the graph hangs on them, and leaves the round where a `SecureClient` would.
"""

import hashlib
from functools import lru_cache

from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.derive import SIGNATURE_BYTES
from umbel.aggregation.secagg.crypto.shamir import SHARE_BYTES
from umbel.aggregation.secagg.masked_input import masked_input
from umbel.aggregation.secagg.messages import (
    Indices,
    Roster,
    Unmasking,
    decode_agreements,
    decode_indices,
    share_keys_bytes,
)
from umbel.aggregation.secagg.numbers.contribution import Contribution
from umbel.aggregation.secagg.session import Session

_SIGNATURE, _SHARE = bytes(SIGNATURE_BYTES), bytes(SHARE_BYTES)


class MaskingVoice:
    """A client with its keys and masks. `contribution`: what it masks."""

    def __init__(self, client: SecureClient, contribution: Contribution) -> None:
        self._client, self._contribution = client, contribution
        self.advertise, self.share, self.hear = client.advertise, client.share, client.hear
        self.agree, self.reveal = client.agree, client.reveal

    def mask(self) -> tuple[bytes, bytes]:
        update = b"".join(masked_input(self._contribution, self._client))
        return update, self._client.sign_input(hashlib.sha256(update).digest())


class UnheardVoice:
    """The same of a client of which no update is taken, so that none was made: it sends as many bytes."""

    def __init__(self, client: SecureClient, update: bytes) -> None:
        self._update = update
        self.advertise, self.share, self.hear = client.advertise, client.share, client.hear
        self.agree, self.reveal = client.agree, client.reveal

    def mask(self) -> tuple[bytes, bytes]:
        return self._update, _SIGNATURE


class BlankVoice:
    """A client that masks nothing. `client`: whose keys it advertises; `update`: as many bytes as it would send."""

    def __init__(self, client: SecureClient, update: bytes) -> None:
        self.advertise = client.advertise
        self._context, self._index, self._update = client.context, client.index, update
        self._shared: Indices = ()
        self._inputs: Indices = ()

    def share(self, roster: bytes) -> bytes:
        self._session = _session_of(self._context, roster)
        return bytes(share_keys_bytes(len(self._session.neighbours(self._index))))

    def hear(self, inbox: bytes) -> None:
        n_shared = int.from_bytes(inbox[:4], "little")
        self._shared = _indices(inbox[: 4 * (n_shared + 1)], len(self._context.cohort))
        self._session.require_enough(self._index, self._shared, "shared its keys", "shared their keys")

    def mask(self) -> tuple[bytes, bytes]:
        return self._update, _SIGNATURE

    def agree(self, inputs: bytes) -> bytes:
        self._inputs = _indices(inputs, len(self._context.cohort))
        self._session.require_enough(self._index, self._inputs, "is in the sum", "are in the sum")
        return _SIGNATURE

    def reveal(self, agreements: bytes) -> bytes:
        holders, signed = set(self._session.holders(self._index)), _signed(agreements, len(self._context.cohort))
        n_signed = len(holders.intersection(signed, self._inputs))
        self._session.require_threshold(n_signed, "has signed the sum", "have signed the sum")
        return Unmasking(self._index, dict.fromkeys(holders.intersection(self._shared), _SHARE)).encode()


# What is told to all alike is read once.


@lru_cache(maxsize=1)
def _session_of(context: Context, roster: bytes) -> Session:
    """Signatures are not checked: nobody cheats here."""
    read = Roster.decode(roster, len(context.cohort))
    return Session(context, read.opening, {one.index: one for one in read.adverts})


@lru_cache(maxsize=2)
def _indices(data: bytes, n_cohort: int) -> Indices:
    return decode_indices(data, n_cohort)


@lru_cache(maxsize=1)
def _signed(agreements: bytes, n_cohort: int) -> frozenset[int]:
    return frozenset(decode_agreements(agreements, n_cohort))
