"""What the clients of a simulated secure round say: real messages, or blank ones of the same length.

Masks cancel, so only the bytes on the wire depend on them. A client with blank messages still sends its real public
keys, because the graph depends on them, and leaves the round where a `SecureClient` would. The coordinator of such
clients counts their messages and does not check them.

An attempt has one `Masking`: `RealMasking` or `BlankMasking` makes the voices, the coordinator and the sum.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

from torch import Tensor

from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.crypto.derive import SHARE_COMMITMENT_BYTES, SIGNATURE_BYTES
from umbel.aggregation.secagg.crypto.sealed import SEALED_BYTES
from umbel.aggregation.secagg.crypto.shamir import SHARE_BYTES
from umbel.aggregation.secagg.masked_input import MaskedReader, masked_input, unmasked
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Dealt,
    Indices,
    Roster,
    ShareKeys,
    Unmasking,
    decode_agreements,
    decode_indices,
    encode_indices,
    share_keys_bytes,
)
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import Contribution
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.grid import IntegerSum
from umbel.sim.secure.devices import Voice

_SIGNATURE, _SHARE = bytes(SIGNATURE_BYTES), bytes(SHARE_BYTES)


class RealVoice:
    """A client with real keys and shares. `made`: what it masks; or bytes of that length, if no update is accepted."""

    def __init__(self, client: SecureClient, made: Contribution | bytes) -> None:
        self._client, self._made = client, made
        self.advertise, self.share, self.hear = client.advertise, client.share, client.hear
        self.agree, self.reveal = client.agree, client.reveal

    def mask(self) -> tuple[bytes, bytes]:
        if isinstance(self._made, bytes):
            return self._made, _SIGNATURE
        update = b"".join(masked_input(self._made, self._client))
        return update, self._client.sign_input(hashlib.sha256(update).digest())


class BlankVoice:
    """A client that masks nothing. `client`: gives the keys; `update`: as many bytes as a masked update."""

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


# Messages that all clients get are decoded once.


@lru_cache(maxsize=1)
def _session_of(context: Context, roster: bytes) -> Session:
    """Signatures are not checked: all these clients are honest."""
    read = Roster.decode(roster, len(context.cohort))
    return Session(context, read.opening, {one.index: one for one in read.adverts})


@lru_cache(maxsize=2)
def _indices(data: bytes, n_cohort: int) -> Indices:
    return decode_indices(data, n_cohort)


@lru_cache(maxsize=1)
def _signed(agreements: bytes, n_cohort: int) -> frozenset[int]:
    return frozenset(decode_agreements(agreements, n_cohort))


_COMMITMENT = bytes(SHARE_COMMITMENT_BYTES)
_BLANK_DEALT = Dealt(_COMMITMENT, _COMMITMENT, bytes(SEALED_BYTES)).encode()


class CountingCoordinator(SecureCoordinator):
    """The coordinator of `BlankVoice`s. Only the keys are real, because the graph depends on them."""

    def __init__(self, context: Context, opening: bytes) -> None:
        super().__init__(context, opening)
        self._n_revealed = Counter[int]()

    def check_keys(self, index: int, message: bytes) -> AdvertiseKeys:
        return AdvertiseKeys.decode(message)

    def check_shares(self, index: int, message: bytes) -> ShareKeys:
        return ShareKeys(index, b"", {}, b"")

    def inbox(self, index: int) -> bytes:
        shared = self.shared or ()
        n_dealers = len(set(self.session.neighbours(index)).intersection(shared))
        return encode_indices(shared) + _BLANK_DEALT * n_dealers

    def check_agreement(self, index: int, signature: bytes) -> None:
        """It is blank."""

    def take_shares(self, index: int, message: bytes) -> bool:
        self._n_revealed.update(self.session.holders(index))
        return True

    @property
    def is_enough(self) -> bool:
        return all(self._n_revealed[dealer] >= self.session.threshold for dealer in self.shared or ())


class RealMasking:
    """Clients mask their inputs, and the coordinator checks, sums and unmasks them.

    `inputs`: of the clients whose update is accepted. The others send zeros of the same length.
    """

    coordinator = SecureCoordinator

    def __init__(self, composition: Composition, inputs: Mapping[ClientId, Contribution]) -> None:
        self._composition, self._inputs, self._reader = composition, inputs, MaskedReader(composition)
        self._total: IntegerSum = self._reader.new_sum()
        self._zeros = bytes(self._reader.update_bytes.start)

    def voice(self, client: SecureClient) -> Voice:
        return RealVoice(client, self._inputs.get(client.context.names[client.index], self._zeros))

    def take(self, party: SecureCoordinator, index: int, update: bytes, signature: bytes) -> None:
        """Add a client's update, if the client has signed it."""
        party.check_input(index, hashlib.sha256(update).digest(), signature)
        self._reader.fold(self._total, update)

    def unmasked(self, party: SecureCoordinator) -> tuple[Tensor, Tensor] | None:
        """The sums of the levels and of the words, without masks."""
        return unmasked(self._total, self._composition, party.open())


class BlankMasking:
    """Clients send zeros, and nothing is summed."""

    coordinator = CountingCoordinator

    def __init__(self, composition: Composition) -> None:
        self._update = bytes(MaskedReader(composition).update_bytes.start)

    def voice(self, client: SecureClient) -> Voice:
        return BlankVoice(client, self._update)

    def take(self, party: SecureCoordinator, index: int, update: bytes, signature: bytes) -> None:
        """Nothing is summed."""

    def unmasked(self, party: SecureCoordinator) -> tuple[Tensor, Tensor] | None:
        return None


Masking: TypeAlias = RealMasking | BlankMasking
