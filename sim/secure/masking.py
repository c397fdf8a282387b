"""What the coordinator of a simulated secure round makes of messages: in earnest, or counting them."""

import hashlib
from collections import Counter
from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.derive import SHARE_COMMITMENT_BYTES
from umbel.aggregation.secagg.crypto.sealed import SEALED_BYTES
from umbel.aggregation.secagg.crypto.signing import Label
from umbel.aggregation.secagg.masked_input import MaskedReader, unmasked
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Dealt,
    Inbox,
    Indices,
    ShareKeys,
    Unmasking,
    encode_indices,
)
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.session import Session, check_advert, check_signature
from umbel.aggregation.secagg.unmasking import Sum, Unmasker
from umbel.aggregation.update.integer_sum import IntegerSum

_COMMITMENT = bytes(SHARE_COMMITMENT_BYTES)
_BLANK_DEALT = Dealt(_COMMITMENT, _COMMITMENT, bytes(SEALED_BYTES)).encode()


class Masking(Protocol):
    """Takes what clients of one attempt say; clients by their index. Raises `SecAggError` for what is not right."""

    def hear_keys(self, context: Context, advert: AdvertiseKeys) -> None: ...
    def hear_shares(self, session: Session, index: int, body: bytes) -> None: ...
    def inbox(self, session: Session, index: int, shared: Indices) -> bytes:
        """What this client is told of who has shared keys (U2), and of their shares for it."""
        ...

    def hear_input(self, session: Session, shared: Indices, index: int, update: bytes, signature: bytes) -> None: ...
    def hear_agreement(self, session: Session, index: int, payload: bytes, signature: bytes) -> None: ...
    def hear_revealed(self, session: Session, of: Sum, index: int, body: bytes) -> bool:
        """Whether the sum can be unmasked now."""
        ...


class Masks:
    """In earnest. `sums`: of the levels and the words, when they are unmasked; None before."""

    def __init__(self, composition: Composition) -> None:
        self.sums: tuple[Tensor, Tensor] | None = None
        self._composition = composition
        self._reader = MaskedReader(composition)
        self._total: IntegerSum = self._reader.new_sum()
        self._dealt = dict[int, ShareKeys]()
        self._unmasker: Unmasker | None = None

    def hear_keys(self, context: Context, advert: AdvertiseKeys) -> None:
        check_advert(context, advert)

    def hear_shares(self, session: Session, index: int, body: bytes) -> None:
        dealt = ShareKeys.decode(body, index, session.neighbours(index))
        session.check_shares(dealt)
        self._dealt[index] = dealt

    def inbox(self, session: Session, index: int, shared: Indices) -> bytes:
        dealers = _dealers(session, index, shared)
        return Inbox(shared, {dealer: self._dealt[dealer].dealt[index] for dealer in dealers}).encode()

    def hear_input(self, session: Session, shared: Indices, index: int, update: bytes, signature: bytes) -> None:
        payload = session.input_payload(shared, hashlib.sha256(update).digest())
        check_signature(session.context, index, Label.MASKED_INPUT, session.digest, payload, signature)
        head, body = update[: self._reader.header_bytes], update[self._reader.header_bytes :]
        self._total.add(self._reader.integers(head, [body], 0), 1)

    def hear_agreement(self, session: Session, index: int, payload: bytes, signature: bytes) -> None:
        check_signature(session.context, index, Label.CONSISTENCY, session.digest, payload, signature)

    def hear_revealed(self, session: Session, of: Sum, index: int, body: bytes) -> bool:
        if self._unmasker is None:
            self._unmasker = Unmasker(session, of, self._dealt)
        self._unmasker.take(Unmasking.decode(body, index, len(session.context.cohort)))
        if self._unmasker.is_enough:
            self.sums = unmasked(self._total, self._composition, self._unmasker.open())
        return self._unmasker.is_enough


class NoMasks:
    """Of `BlankVoice`s: how many shares of each secret are revealed is counted, and that is all."""

    def __init__(self) -> None:
        self._n_revealed = Counter[int]()

    def hear_keys(self, context: Context, advert: AdvertiseKeys) -> None:
        """They are as they should be, as all that follows."""

    def hear_shares(self, session: Session, index: int, body: bytes) -> None: ...

    def inbox(self, session: Session, index: int, shared: Indices) -> bytes:
        return encode_indices(shared) + _BLANK_DEALT * len(_dealers(session, index, shared))

    def hear_input(self, session: Session, shared: Indices, index: int, update: bytes, signature: bytes) -> None: ...
    def hear_agreement(self, session: Session, index: int, payload: bytes, signature: bytes) -> None: ...

    def hear_revealed(self, session: Session, of: Sum, index: int, body: bytes) -> bool:
        self._n_revealed.update(session.holders(index))
        return all(self._n_revealed[dealer] >= session.threshold for dealer in of.shared)


def _dealers(session: Session, index: int, shared: Indices) -> Collection[int]:
    """Who has dealt this client a share that it is told of."""
    return set(session.neighbours(index)).intersection(shared)
