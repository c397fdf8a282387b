"""The coordinator's side of one secure round: checks the clients' messages and makes its own.

```
clients' message    check it            once its phase is over    coordinator's message
AdvertiseKeys       check_keys          close_roster  (U1)        roster
ShareKeys           check_shares        close_shares  (U2)        inbox
MaskedInput         check_input         close_inputs  (U3)        inputs
ConsistencyCheck    check_agreement                               agreements
Unmasking           take_shares         is_enough                 open
```

It is the pure counterpart of `SecureClient` (`client.py`). The round's machine decides whose turn it is and whose
message counts (`turns.py`). Public messages are stored elsewhere, so another process can make this object again.
Revealed shares are only in this object's memory: after a restart the clients are asked again, and answer the same.
Clients are named by their index in the cohort. Bonawitz et al. 2017, figure 4, with the graph of Bell et al. 2020.
"""

from collections.abc import Iterable, Mapping, Set

from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.signing import Label
from umbel.aggregation.secagg.errors import ForgedMessage, OutOfTurn
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Inbox,
    Indices,
    ShareKeys,
    Unmasking,
    encode_agreements,
    encode_indices,
)
from umbel.aggregation.secagg.session import Session, check_advert, check_signature
from umbel.aggregation.secagg.unmasking import Lacking, Opened, Unmasker


class SecureCoordinator:
    """The coordinator of one attempt. Not thread-safe.

    `opening`: 32 secret bytes, to which the context commits; the roster reveals them. A check returns the decoded
    message, or raises `SecAggError`, which names the client if the message shows that it lied.
    """

    def __init__(self, context: Context, opening: bytes) -> None:
        self.context = context
        self.shared: Indices | None = None
        self.summed: Indices | None = None
        self._opening = opening
        self._session: Session | None = None
        self._roster = b""
        self._dealt: Mapping[int, ShareKeys] | None = None
        self._unmasker: Unmasker | None = None

    # --- AdvertiseKeys: U1 --------------------------------------------------------------------------------------------

    def check_keys(self, index: int, message: bytes) -> AdvertiseKeys:
        """Check a client's keys. Raises `MalformedMessage`, `BadKey`, `ForgedMessage`."""
        advert = AdvertiseKeys.decode(message)
        if advert.index != index:
            raise ForgedMessage("the message names another client of the cohort as its sender")
        check_advert(self.context, advert)
        return advert

    def close_roster(self, adverts: Iterable[AdvertiseKeys]) -> None:
        """Close U1 with the checked keys of these clients."""
        self._session = Session(self.context, self._opening, {advert.index: advert for advert in adverts})
        self._roster = self._session.roster().encode()

    @property
    def session(self) -> Session:
        """The session of the closed roster. Raises `OutOfTurn` while the roster is open."""
        if self._session is None:
            raise OutOfTurn(
                "the roster of this round is not closed yet; request the roster (the list of participants) first, and "
                "wait for it"
            )
        return self._session

    @property
    def has_roster(self) -> bool:
        return self._session is not None

    def roster(self) -> bytes:
        """The message to all of U1: all keys."""
        _ = self.session
        return self._roster

    # --- ShareKeys: U2 ------------------------------------------------------------------------------------------------

    def read_shares(self, index: int, message: bytes) -> ShareKeys:
        """A ShareKeys message whose signature was checked before. Raises `MalformedMessage`."""
        return ShareKeys.decode(message, index, self.session.neighbours(index))

    def check_shares(self, index: int, message: bytes) -> ShareKeys:
        """Check the sealed shares that a client deals. Raises `MalformedMessage`, `ForgedMessage`."""
        dealt = self.read_shares(index, message)
        self.session.check_shares(dealt)
        return dealt

    def close_shares(self, shared: Iterable[int]) -> None:
        """Close U2: these clients have dealt shares."""
        self.shared = tuple(sorted(shared))

    @property
    def has_shares(self) -> bool:
        """Whether the ShareKeys messages are loaded, which `inbox` and `take_shares` need."""
        return self._dealt is not None

    def load_shares(self, dealt: Mapping[int, ShareKeys]) -> None:
        """Load the ShareKeys messages of U2, by dealer."""
        self._dealt = dict(sorted(dealt.items()))

    def inbox(self, index: int) -> bytes:
        """The message to one client of U2: the clients in U2, and the shares that were dealt to it."""
        dealt = self._messages()
        dealers = set(self.session.neighbours(index)).intersection(dealt)
        return Inbox(self._require_shared(), {dealer: dealt[dealer].dealt[index] for dealer in dealers}).encode()

    # --- MaskedInput: U3 ----------------------------------------------------------------------------------------------

    def check_input(self, index: int, update_sha256: bytes, signature: bytes) -> None:
        """Raise `ForgedMessage` unless the client has signed this update and the list of clients that share masks."""
        payload = self.session.input_payload(self._require_shared(), update_sha256)
        self._check_signature(index, Label.MASKED_INPUT, payload, signature)

    def close_inputs(self, summed: Iterable[int]) -> None:
        """Close U3: the masked updates of these clients are in the sum."""
        self.summed = tuple(sorted(summed))

    def inputs(self) -> bytes:
        """The message to all of U3: the clients in the sum."""
        return encode_indices(self._require_summed())

    # --- ConsistencyCheck: U4 -----------------------------------------------------------------------------------------

    def check_agreement(self, index: int, signature: bytes) -> None:
        """Raise `ForgedMessage` unless the client has signed the list of clients in the sum."""
        payload = self.session.consistency_payload(self._require_shared(), self._require_summed())
        self._check_signature(index, Label.CONSISTENCY, payload, signature)

    @staticmethod
    def agreements(signatures: Mapping[int, bytes]) -> bytes:
        """The message to all of U4: the signatures, by client."""
        return encode_agreements(signatures)

    # --- Unmasking ----------------------------------------------------------------------------------------------------

    def take_shares(self, index: int, message: bytes) -> bool:
        """Add the shares that a client reveals; returns whether they are its first. A repeat changes nothing.

        Raises `MalformedMessage`; `BadShare` for a share that its dealer did not commit to; `ChangedMessage` for shares
        that differ from its first; `SecAggError` for a share that it was not asked for.
        """
        is_new = index not in self.answered
        self._revealed().take(Unmasking.decode(message, index, len(self.context.cohort)))
        return is_new

    @property
    def answered(self) -> Set[int]:
        """The clients that have revealed shares."""
        return frozenset() if self._unmasker is None else self._unmasker.answered

    @property
    def is_enough(self) -> bool:
        """Whether every secret that the sum needs has enough shares."""
        return self._revealed().is_enough

    @property
    def is_ready_for_shares(self) -> bool:
        """Whether this object has taken a share, or tried to open the sum."""
        return self._unmasker is not None

    @property
    def lacking(self) -> Lacking:
        """The clients to blame for secrets with too few shares."""
        return self._revealed().lacking

    def open(self) -> Opened:
        """The secrets that unmask the sum. Raises `TooFew`, and `CheatingDealer` for shares of a wrong secret."""
        return self._revealed().open()

    # ------------------------------------------------------------------------------------------------------------------

    def _check_signature(self, index: int, label: Label, payload: bytes, signature: bytes) -> None:
        check_signature(self.context, index, label, self.session.digest, payload, signature)

    def _messages(self) -> Mapping[int, ShareKeys]:
        if self._dealt is None:
            raise OutOfTurn("the clients' ShareKeys messages are not loaded; call load_shares first")
        return self._dealt

    def _require_shared(self) -> Indices:
        if self.shared is None:
            raise OutOfTurn("the phase in which clients share keys is not over yet")
        return self.shared

    def _require_summed(self) -> Indices:
        if self.summed is None:
            raise OutOfTurn("the list of clients in the sum is not closed yet")
        return self.summed

    def _revealed(self) -> Unmasker:
        if self._unmasker is None:
            shared, summed = self._require_shared(), self._require_summed()
            self._unmasker = Unmasker(self.session, shared, summed, self._messages())
        return self._unmasker
