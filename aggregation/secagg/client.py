"""A client in one secure round: messages in, messages out. Its secrets are in memory here, and nowhere else.

```
advertise() ----> share(roster) ----> hear(inbox) ----> masks, sign_input() ----> agree(inputs) ----> reveal(agreements)
AdvertiseKeys     ShareKeys           (U2)              MaskedInput               ConsistencyCheck    Unmasking
```

Each step happens once. A repeated message gets the same answer, so a lost answer can be requested again. A different
message for the same step shows that the coordinator contradicts itself, and ends the round for this client
(`Disagreement`). After `reveal` the client keeps its answers, but no secret. After a refusal it keeps neither. The
protocol is that of Bonawitz et al. 2017, figure 4, with signatures and the consistency check, on the graph of Bell et
al. 2020.
"""

import hashlib
from collections.abc import Callable
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.curve import KEY_BYTES, KeyPair
from umbel.aggregation.secagg.crypto.derive import (
    ShareKind,
    Vector,
    pair_mask_key,
    require_share,
    self_mask_commitment,
    self_mask_key,
    share_commitment,
)
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.crypto.sealed import open_sealed, seal
from umbel.aggregation.secagg.crypto.shamir import split
from umbel.aggregation.secagg.crypto.signing import Label, sign
from umbel.aggregation.secagg.errors import BadShare, Disagreement, OutOfTurn, TooFew
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Dealt,
    Inbox,
    Indices,
    ShareKeys,
    Unmasking,
    decode_agreements,
    decode_indices,
)
from umbel.aggregation.secagg.session import Session, check_signature, name_of
from umbel.aggregation.trust.public_keys import public_key_text

Random = Callable[[int], bytes]
ReadRoster = Callable[[Context, bytes], Session]
Found = TypeVar("Found")


class SecureClient:
    """One client's side of one attempt. Not thread-safe.

    `index`: this client's place in the context's cohort. `random(n)`: returns n unguessable bytes. `minimum_cohort`:
    the fewest clients in a sum by the client's own policy, whatever the coordinator says. `read_roster`: checks a
    roster's signatures and makes the session; a process with many clients can do that once for all of them. Raises
    `TooFew` if the context's minimum is below `minimum_cohort`, and `Disagreement` if the context has another identity
    key for this client.
    """

    def __init__(
        self,
        context: Context,
        index: int,
        identity: Ed25519PrivateKey,
        random: Random,
        minimum_cohort: int = MINIMUM_LEAST,
        read_roster: ReadRoster = Session.of_message,
    ) -> None:
        self.context = context
        self.index = index
        self.complaints: tuple[str, ...] = ()
        if context.minimum < minimum_cohort:
            raise TooFew(
                f"this round allows sums of as few as {context.minimum} clients; this client takes part only in sums "
                f"of at least {minimum_cohort} clients (`minimum_cohort` in its site policy)"
            )
        if context.cohort[index][1] != public_key_text(identity.public_key().public_bytes_raw()):
            raise Disagreement("the identity key that the coordinator lists for this client is not this client's key")
        self._identity = identity
        self._random = random
        self._read_roster = read_roster
        self._channel = KeyPair(random(KEY_BYTES))
        self._mask = KeyPair(random(KEY_BYTES))
        self._self_mask = random(KEY_BYTES)
        self._channels: dict[int, bytes] = {}
        self._pairs: dict[int, bytes] = {}
        self._own_shares: tuple[bytes, bytes] | None = None
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._answers: dict[str, tuple[bytes, object]] = {}
        self._session: Session | None = None
        self._shared: Indices = ()
        self._inputs: Indices = ()
        self._is_over = False

    # --- AdvertiseKeys ------------------------------------------------------------------------------------------------

    def advertise(self) -> bytes:
        """The AdvertiseKeys message."""
        self._require_active()
        unsigned = AdvertiseKeys(self.index, self._channel.public, self._mask.public, b"")
        signature = sign(self._identity, Label.ADVERTISE_KEYS, self.context.digest, unsigned.payload)
        return AdvertiseKeys(self.index, self._channel.public, self._mask.public, signature).encode()

    # --- ShareKeys ----------------------------------------------------------------------------------------------------

    def share(self, roster: bytes) -> bytes:
        """The ShareKeys message for this roster.

        Raises `MalformedMessage`, `BadKey`, `ForgedMessage`, `Disagreement`, `TooFew`.
        """
        return self._once("roster", roster, self._share)

    def _share(self, data: bytes) -> bytes:
        session = self._read_roster(self.context, data)
        own = session.adverts.get(self.index)
        if own is None or own.encode() != self.advertise():
            raise Disagreement(
                "the list of participants (the roster) does not contain the keys that this client advertised"
            )
        self._session = session
        points = [holder + 1 for holder in session.holders(self.index)]
        self_shares = split(self._self_mask, session.threshold, points, self._random)
        key_shares = split(self._mask.seed, session.threshold, points, self._random)
        dealt = {
            point - 1: self._deal(session, point - 1, pair)
            for point, pair in zip(points, zip(self_shares, key_shares, strict=True), strict=True)
        }
        commitment = self_mask_commitment(session.digest, self.index, self._self_mask)
        unsigned = ShareKeys(self.index, commitment, dealt, b"")
        signature = sign(self._identity, Label.SHARE_KEYS, session.digest, unsigned.payload)
        return ShareKeys(self.index, commitment, dealt, signature).encode()

    def _deal(self, session: Session, holder: int, shares: tuple[bytes, bytes]) -> Dealt:
        of_self_mask, of_key = (
            share_commitment(session.digest, kind, self.index, holder, share)
            for kind, share in zip(ShareKind, shares, strict=True)
        )
        if holder == self.index:
            self._own_shares = shares
            return Dealt(of_self_mask, of_key, b"")
        shared = self._shared_channel(session, holder)
        return Dealt(of_self_mask, of_key, seal(shared, session.digest, self.index, holder, shares))

    def _shared_channel(self, session: Session, other: int) -> bytes:
        """The secret that seals shares to and from another client, computed once."""
        if other not in self._channels:
            self._channels[other] = self._channel.shared(session.adverts[other].channel_key)
        return self._channels[other]

    # --- MaskedInput --------------------------------------------------------------------------------------------------

    def hear(self, inbox: bytes) -> None:
        """Read the inbox: which clients have shared, and their shares for this client.

        A share that does not open is noted in `complaints`, and the round continues without it. Raises
        `MalformedMessage`, `Disagreement`, `TooFew`.
        """
        self._once("inbox", inbox, self._hear)

    def _hear(self, data: bytes) -> None:
        session = self._require_session()
        inbox = Inbox.decode(data, len(self.context.cohort), session.neighbours(self.index))
        if not set(inbox.shared) <= session.adverts.keys():
            raise Disagreement(
                "the list of clients that shared keys contains a client that is not in the roster (the list of "
                "participants)"
            )
        if self.index not in inbox.shared:
            raise Disagreement("the list of clients that shared keys leaves this client out")
        session.require_enough(self.index, inbox.shared, "shared its keys", "shared their keys")
        assert self._own_shares is not None, "it has dealt shares to itself"
        self._held = {self.index: self._own_shares}
        complaints: list[str] = []
        for dealer, dealt in inbox.dealt.items():
            try:
                self._held[dealer] = self._opened(session, dealer, dealt)
            except BadShare as error:
                complaints.append(f"{name_of(self.context, dealer)}: {error}")
        self.complaints = tuple(complaints)
        self._shared = inbox.shared

    def _opened(self, session: Session, dealer: int, dealt: Dealt) -> tuple[bytes, bytes]:
        """A dealer's shares for this client. Raises `BadShare`."""
        shared = self._shared_channel(session, dealer)
        shares = open_sealed(shared, session.digest, dealer, self.index, dealt.sealed)
        for kind, share, commitment in zip(ShareKind, shares, dealt.commitments, strict=True):
            require_share(commitment, session.digest, kind, dealer, self.index, share)
        return shares

    def masks(self, vector: Vector) -> Masks:
        """The masks of one vector: the client's own, and one for each neighbour that has shared."""
        session = self._require_inbox()
        keys = [self_mask_key(self._self_mask, session.digest, vector, self.index)]
        signs = [1]
        for other in session.neighbours(self.index):
            if other in self._shared:
                keys.append(pair_mask_key(self._shared_mask(session, other), session.digest, vector, self.index, other))
                signs.append(1 if other > self.index else -1)
        return Masks(keys, signs)

    def _shared_mask(self, session: Session, other: int) -> bytes:
        """The secret from which a pair's masks of both vectors are derived, computed once."""
        if other not in self._pairs:
            self._pairs[other] = self._mask.shared(session.adverts[other].mask_key)
        return self._pairs[other]

    def sign_input(self, body_sha256: bytes) -> bytes:
        """A signature over the masked vector as it is sent, and over the clients that share its masks.

        A client signs only one vector: two vectors with the same masks would reveal their difference.
        """
        self._require_inbox()
        return self._once("input", body_sha256, self._sign_input)

    def _sign_input(self, body_sha256: bytes) -> bytes:
        session = self._require_session()
        payload = session.input_payload(self._shared, body_sha256)
        return sign(self._identity, Label.MASKED_INPUT, session.digest, payload)

    # --- ConsistencyCheck ---------------------------------------------------------------------------------------------

    def agree(self, inputs: bytes) -> bytes:
        """A signature over the list of clients in the sum.

        Raises `MalformedMessage`, `Disagreement`, `TooFew`; `OutOfTurn` if this client has sent no vector.
        """
        if "input" not in self._answers:
            raise OutOfTurn("this client has not sent a masked update, so it cannot be in the sum")
        return self._once("inputs", inputs, self._agree)

    def _agree(self, data: bytes) -> bytes:
        session = self._require_session()
        inputs = decode_indices(data, len(self.context.cohort))
        if not set(inputs) <= set(self._shared):
            raise Disagreement("the list of clients in the sum contains a client that did not share its keys")
        if self.index not in inputs:
            raise Disagreement("the list of clients in the sum leaves this client out")
        session.require_enough(self.index, inputs, "is in the sum", "are in the sum")
        self._inputs = inputs
        payload = session.consistency_payload(self._shared, inputs)
        return sign(self._identity, Label.CONSISTENCY, session.digest, payload)

    # --- Unmasking ----------------------------------------------------------------------------------------------------

    def reveal(self, agreements: bytes) -> bytes:
        """The Unmasking message: a share of each client's self mask, or of its mask key if it is not in the sum.

        Erases every secret. Raises `MalformedMessage`, `TooFew` if fewer than t clients have signed the same sum,
        `ForgedMessage`, `OutOfTurn`.
        """
        if not self._inputs:
            raise OutOfTurn("this client has not yet signed the list of clients in the sum")
        return self._once("agreements", agreements, self._reveal)

    def _reveal(self, data: bytes) -> bytes:
        session = self._require_session()
        signatures = decode_agreements(data, len(self.context.cohort))
        holders = set(session.holders(self.index))
        payload = session.consistency_payload(self._shared, self._inputs)
        signed = holders.intersection(signatures, self._inputs)
        for index in sorted(signed):
            check_signature(self.context, index, Label.CONSISTENCY, session.digest, payload, signatures[index])
        session.require_threshold(len(signed), "has signed the sum", "have signed the sum")
        revealed = {
            dealer: self_share if dealer in self._inputs else key_share
            for dealer, (self_share, key_share) in self._held.items()
        }
        answer = Unmasking(self.index, revealed).encode()
        self._erase()
        return answer

    # --- every step ---------------------------------------------------------------------------------------------------

    def _once(self, step: str, data: bytes, take: Callable[[bytes], Found]) -> Found:
        """Do a step, or repeat its answer. After a refusal there is no further step."""
        digest = hashlib.sha256(data).digest()
        if step in self._answers:
            said, answer = self._answers[step]
            if said != digest:
                self.abort()
                if step == "input":
                    raise Disagreement("this client has already signed a different masked update in this attempt")
                raise Disagreement(f"the coordinator has sent the message '{step}' twice, with different content")
            return answer  # type: ignore[return-value]
        self._require_active()
        try:
            answer = take(data)
        except BaseException:  # half a step must not be repeated, whatever interrupted it
            self.abort()
            raise
        self._answers[step] = digest, answer
        return answer

    def abort(self) -> None:
        """Erase everything; this client sends nothing more in this attempt."""
        self._erase()
        self._answers = {}

    def _erase(self) -> None:
        """Drop every secret. (Python frees the memory, but cannot be made to overwrite it.)"""
        self._is_over = True
        self._self_mask = b""
        self._own_shares = None
        self._held, self._channels, self._pairs = {}, {}, {}
        self._channel = self._mask = KeyPair(bytes(KEY_BYTES))

    def _require_active(self) -> None:
        if self._is_over:
            raise OutOfTurn(
                "this client has left the round, or has revealed its shares: it does nothing more in this attempt"
            )

    def _require_session(self) -> Session:
        if self._session is None:
            raise OutOfTurn("this client has not yet received the list of participants (the roster)")
        return self._session

    def _require_inbox(self) -> Session:
        self._require_active()
        if not self._shared:
            raise OutOfTurn("this client has not yet received the other clients' shares (its inbox)")
        return self._require_session()
