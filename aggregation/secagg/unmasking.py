"""From the shares that clients reveal to the masks that come off the sum: a coordinator's only secrets, in memory."""

import hmac
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
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
class Sum:
    """Whose vectors are in a sum. `shared`: U2; `inputs`: U3, of those."""

    shared: Indices
    inputs: Indices


@dataclass(frozen=True, slots=True)
class Lacking:
    """Why a secret lacks shares though t clients or more have answered that were dealt one.

    `dealers`: dealer -> at whom its shares did not open, which are so many that no t others are left. `withheld`:
    client -> of whom else it has revealed no share: of dealers of whom others have, or could have, t.
    """

    dealers: Mapping[int, Indices]
    withheld: Mapping[int, Indices]


class Unmasker:
    """Takes Unmasking messages until every secret that stands in the way can be made. Not thread-safe.

    `dealt`: the ShareKeys messages of U2, by index, with signatures that were checked.
    """

    def __init__(self, session: Session, of: Sum, dealt: Mapping[int, ShareKeys]) -> None:
        self._session = session
        self._of = of
        self._dealt = dealt
        self._inputs = frozenset(of.inputs)
        self._shares: dict[int, dict[int, bytes]] = {dealer: {} for dealer in of.shared}
        self._said: dict[int, Unmasking] = {}

    @property
    def answered(self) -> Set[int]:
        """Who has revealed shares."""
        return self._said.keys()

    def take(self, message: Unmasking) -> None:
        """Take in what one client reveals. The same again changes nothing.

        Raises `SecAggError` for a client that is not in the sum or a share that was not asked for, `BadShare`, naming
        the client, for one that its dealer did not commit to, `ChangedMessage` for another message than its first. A
        refused message changes nothing.
        """
        session, holder = self._session, message.index
        if holder not in self._inputs:
            raise SecAggError(f"{name_of(session.context, holder)} is not in the sum, and has nothing to reveal")
        if strangers := message.shares.keys() - set(session.holders(holder)).intersection(self._of.shared):
            raise SecAggError(
                f"{name_of(session.context, holder)} reveals a share of {name_of(session.context, min(strangers))}, "
                "which it was not asked for"
            )
        for dealer, share in message.shares.items():
            kind = ShareKind.SELF_MASK if dealer in self._inputs else ShareKind.MASK_KEY
            committed = self._dealt[dealer].dealt[holder].commitments[kind]
            try:
                require_share(committed, session.digest, kind, dealer, holder, share)
            except BadShare as error:
                name, dealt_by = name_of(session.context, holder), name_of(session.context, dealer)
                raise BadShare(f"{name} reveals a share that is not the one {dealt_by} dealt to it") from error
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
        """By whom a secret has fewer than t shares though t clients or more have answered that were dealt one.

        Who answers may leave a share out, as it must one that does not open, and nobody sees which it was. A dealer is
        named only where n - t + 1 of its n holders or more left its share out: then no t of them could have come. Of
        fewer, the others could have come, had they all answered; there those who left it out are named.
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
        """Make every secret. Raises `TooFew`, and `CheatingDealer` where good shares make wrong secrets."""
        threshold, interpolations = self._session.threshold, dict[tuple[int, ...], Interpolation]()
        self_masks, keys, cheating = dict[int, bytes](), dict[int, KeyPair](), dict[int, str]()
        for dealer, shares in self._shares.items():
            if len(shares) < threshold:
                name = name_of(self._session.context, dealer)
                were = counted(len(shares), f"share of {name}'s secret was", f"shares of {name}'s secret were")
                raise TooFew(f"{were} revealed, of {threshold}")
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
            except SecAggError:  # go on: whoever else has cheated is to be known, too
                cheating[dealer] = name_of(self._session.context, dealer)
        if cheating:
            raise CheatingDealer(cheating)
        return Opened(self._session, self._of, self_masks, keys)

    def _pair(self, dealer: int, seed: bytes) -> KeyPair:
        pair = KeyPair(seed)
        if not hmac.compare_digest(pair.public, self._session.adverts[dealer].mask_key):
            raise BadKey("this is not the seed of the key that was advertised")
        return pair


class Opened:
    """The secrets of a round whose sum can be unmasked. `keys`: of those who shared and are not in the sum."""

    def __init__(self, session: Session, of: Sum, self_masks: Mapping[int, bytes], keys: Mapping[int, KeyPair]) -> None:
        self._session = session
        self._of = of
        self._self_masks = self_masks
        self._keys = keys
        self._pairs: dict[tuple[int, int], bytes] = {}

    def masks(self, vector: Vector) -> Masks:
        """What, added to the sum of masked vectors, leaves the sum of what was masked."""
        digest, derived, signs = self._session.digest, list[bytes](), list[int]()
        for index, secret in self._self_masks.items():
            derived.append(self_mask_key(secret, digest, vector, index))
            signs.append(-1)
        for gone, pair in self._keys.items():
            for other in self._alive(self._session.neighbours(gone)):
                if (gone, other) not in self._pairs:  # exchanged once, for both vectors
                    self._pairs[gone, other] = pair.shared(self._session.adverts[other].mask_key)
                derived.append(pair_mask_key(self._pairs[gone, other], digest, vector, gone, other))
                signs.append(-1 if gone > other else 1)  # `other` has added it, or taken it off
        return Masks(derived, signs)

    def _alive(self, indices: Iterable[int]) -> list[int]:
        inputs = set(self._of.inputs)
        return [index for index in indices if index in inputs]
