"""From revealed shares to the masks of the sum: the coordinator's only secrets, kept in memory."""

import hmac
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from umbel.aggregation.phrases import counted
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.derive import (
    ShareKind,
    Vector,
    pair_mask_key,
    require_self_mask,
    require_share,
    self_mask_key,
)
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.crypto.shamir import Interpolation
from umbel.aggregation.secagg.errors import BadKey, BadShare, ChangedMessage, CheatingDealer, SecAggError, TooFew
from umbel.aggregation.secagg.messages import Indices, ShareKeys, Unmasking
from umbel.aggregation.secagg.session import Session, name_of


@dataclass(frozen=True, slots=True)
class Lacking:
    """The clients to blame for secrets with too few shares, although t or more of their holders have answered."""

    dealers: Mapping[int, Indices]  # dealer -> holders without its share; they leave fewer than t other holders
    withheld: Mapping[int, Indices]  # holder -> dealers whose share it did not reveal, although t others could


class Unmasker:
    """Takes Unmasking messages until every needed secret can be made. Not thread-safe.

    `shared`: U2. `inputs`: U3, the clients in the sum. `dealt`: the ShareKeys messages of U2, by index, with checked
    signatures.
    """

    def __init__(self, session: Session, shared: Indices, inputs: Indices, dealt: Mapping[int, ShareKeys]) -> None:
        self._session = session
        self._dealt = dealt
        self._inputs = frozenset(inputs)
        self._shares: dict[int, dict[int, bytes]] = {dealer: {} for dealer in shared}
        self._said: dict[int, Unmasking] = {}

    @property
    def answered(self) -> Set[int]:
        """The clients that have revealed shares."""
        return self._said.keys()

    def take(self, message: Unmasking) -> None:
        """Add the shares that one client reveals. A repeated or refused message changes nothing.

        Raises `SecAggError` for a client that is not in the sum or a share that was not asked for, `BadShare`, with the
        client's name, for a share that its dealer did not commit to, `ChangedMessage` for a second, different message.
        """
        session, holder = self._session, message.index
        if holder not in self._inputs:
            raise SecAggError(f"{name_of(session.context, holder)} is not in the sum, so it has no shares to reveal")
        if strangers := message.shares.keys() - set(session.holders(holder)).intersection(self._shares):
            raise SecAggError(
                f"{name_of(session.context, holder)} revealed a share of the secret of "
                f"{name_of(session.context, min(strangers))}, which it was not asked for"
            )
        for dealer, share in message.shares.items():
            kind = ShareKind.SELF_MASK if dealer in self._inputs else ShareKind.MASK_KEY
            committed = self._dealt[dealer].dealt[holder].commitments[kind]
            try:
                require_share(committed, session.digest, kind, dealer, holder, share)
            except BadShare as error:
                name, dealt_by = name_of(session.context, holder), name_of(session.context, dealer)
                raise BadShare(f"{name} revealed another share than the one that {dealt_by} dealt to it") from error
        if self._said.setdefault(holder, message) != message:
            name = name_of(session.context, holder)
            raise ChangedMessage(f"{name} has already revealed different shares: it may reveal shares only once")
        for dealer, share in message.shares.items():
            self._shares[dealer][holder] = share

    @property
    def is_enough(self) -> bool:
        """Whether every secret has t shares."""
        return all(len(shares) >= self._session.threshold for shares in self._shares.values())

    @property
    def lacking(self) -> Lacking:
        """The clients to blame for secrets with fewer than t shares although t or more of their holders have answered.

        A client may leave a share out, and must if it does not open. Nobody sees which of the two it was. If n - t + 1
        or more of a dealer's n holders left its share out, t shares were impossible, and the dealer is blamed. With
        fewer, t shares were possible, and the clients that left it out are blamed.
        """
        threshold, dealers, withheld = self._session.threshold, dict[int, Indices](), defaultdict[int, list[int]](list)
        for dealer, shares in self._shares.items():
            holders = self._session.holders(dealer)
            asked = self.answered & set(holders)
            if not len(shares) < threshold <= len(asked):
                continue
            without = tuple(sorted(asked - shares.keys()))
            if len(without) > len(holders) - threshold:
                dealers[dealer] = without
            else:
                for holder in without:
                    withheld[holder].append(dealer)
        return Lacking(dealers, {holder: tuple(withheld[holder]) for holder in sorted(withheld)})

    def open(self) -> "Opened":
        """Make every secret. Raises `TooFew`, and `CheatingDealer` if committed shares make wrong secrets."""
        threshold, interpolations = self._session.threshold, dict[tuple[int, ...], Interpolation]()
        self_masks, keys, cheating = dict[int, bytes](), dict[int, KeyPair](), dict[int, str]()
        for dealer, shares in self._shares.items():
            if len(shares) < threshold:
                name = name_of(self._session.context, dealer)
                were = counted(len(shares), f"share of {name}'s secret was", f"shares of {name}'s secret were")
                raise TooFew(f"only {were} revealed; {threshold} are needed")
            holders = tuple(sorted(shares)[:threshold])
            if holders not in interpolations:
                interpolations[holders] = Interpolation(tuple(holder + 1 for holder in holders), threshold)
            try:
                secret = interpolations[holders].secret([shares[holder] for holder in holders])
                if dealer in self._inputs:
                    committed = self._dealt[dealer].self_mask_commitment
                    require_self_mask(committed, self._session.digest, dealer, secret)
                    self_masks[dealer] = secret
                else:
                    keys[dealer] = self._pair(dealer, secret)
            except SecAggError:  # continue, to find all cheating dealers
                cheating[dealer] = name_of(self._session.context, dealer)
        if cheating:
            raise CheatingDealer(cheating)
        return Opened(self._session, self_masks, keys)

    def _pair(self, dealer: int, seed: bytes) -> KeyPair:
        pair = KeyPair(seed)
        if not hmac.compare_digest(pair.public, self._session.adverts[dealer].mask_key):
            name = name_of(self._session.context, dealer)
            raise BadKey(
                f"the shares of {name}'s secret restore a seed that does not fit the mask key that {name} advertised"
            )
        return pair


class Opened:
    """The secrets that unmask a sum. `self_masks`: of the clients in it. `keys`: of the others that shared."""

    def __init__(self, session: Session, self_masks: Mapping[int, bytes], keys: Mapping[int, KeyPair]) -> None:
        self._session = session
        self._self_masks = self_masks
        self._keys = keys
        self._pairs: dict[tuple[int, int], bytes] = {}

    def masks(self, vector: Vector) -> Masks:
        """The masks that turn the sum of masked vectors into the sum of the vectors."""
        digest, derived, signs = self._session.digest, list[bytes](), list[int]()
        for index, secret in self._self_masks.items():
            derived.append(self_mask_key(secret, digest, vector, index))
            signs.append(-1)
        for gone, pair in self._keys.items():
            for other in [one for one in self._session.neighbours(gone) if one in self._self_masks]:
                if (gone, other) not in self._pairs:  # exchanged once, for both vectors
                    self._pairs[gone, other] = pair.shared(self._session.adverts[other].mask_key)
                derived.append(pair_mask_key(self._pairs[gone, other], digest, vector, gone, other))
                signs.append(-1 if gone > other else 1)  # `other` has added or subtracted it
        return Masks(derived, signs)
