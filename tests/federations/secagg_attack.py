"""A coordinator that breaks no rule of arithmetic and every other: all that it saw of a secure round, and what can be
made of it.

It knows the protocol and holds every message. It pools the shares that were revealed, makes every secret that they
open, derives every mask that a secret gives, tries keys that anybody could guess, and takes the masks off each client's
vector, alone, off differences and off sums. It knows that it has won by what stands among the words: each client has
counted itself once.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import combinations, product

import torch
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.derive import ShareKind, Vector, pair_mask_key, require_share, self_mask_key
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.crypto.shamir import Interpolation
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.masked_input import MaskedReader, lane_dtype
from umbel.aggregation.secagg.messages import ShareKeys
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.session import Session

CLOSE = 0.15
"""A correlation beyond this is a vector that was found; of 3,000 values chance makes 0.018."""


@dataclass
class Evidence:
    """What a coordinator has of one attempt, by the clients' indices. `revealed`: who revealed which shares; the same
    client may have done it twice."""

    composition: Composition
    session: Session
    dealt: Mapping[int, ShareKeys]
    updates: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    revealed: list[tuple[int, Mapping[int, bytes]]] = field(default_factory=list)


@dataclass(frozen=True)
class Vectors:
    """Levels (int32, modulo 2^bits) and words (int64), of one client or of several."""

    levels: Tensor
    words: Tensor

    def minus(self, other: "Vectors") -> "Vectors":
        return Vectors(self.levels - other.levels, self.words - other.words)


@dataclass
class Loot:
    """`secrets`: which were made, by client. `vectors`: what was found of single clients, and how."""

    secrets: dict[ShareKind, dict[int, bytes]]
    vectors: dict[int, dict[str, Vectors]]


class Attack:
    """Everything that can be tried on the evidence."""

    def __init__(self, evidence: Evidence) -> None:
        self._of = evidence
        self._session = evidence.session
        self._secrets = {kind: dict(self._opened(kind)) for kind in ShareKind}

    def loot(self) -> Loot:
        vectors: dict[int, dict[str, Vectors]] = defaultdict(dict)
        for index, bodies in self._of.updates.items():
            for body in bodies:
                for how, found in self._unmasked(index, body):
                    if self._is_one_client(found.words):
                        vectors[index][how] = found
            for one, other in combinations(bodies, 2):
                found = self.read(one).minus(self.read(other))
                if self._is_a_difference(found.words):
                    vectors[index]["difference"] = found
        return Loot(self._secrets, dict(vectors))

    def correlations(self, truths: Mapping[int, Tensor], total: Vectors) -> dict[tuple[str, int], float]:
        """How like each client's true change each vector is that can be made of what was sent. `total`: the sum that
        the round was for, which is like each of them and does not count."""
        found: dict[tuple[str, int], float] = {}
        owners, composition = list(truths), self._of.composition
        known = torch.stack([_unit(truths[owner]) for owner in owners])
        for name, candidate in self._candidates(total):
            lifted = lift(candidate.levels, composition.secure.bits)
            guess = _unit(composition.modular.mean(lifted, 1))
            found |= {(name, owner): abs(alike) for owner, alike in zip(owners, (known @ guess).tolist(), strict=True)}
        return found

    def read(self, body: bytes) -> Vectors:
        composition, reader = self._of.composition, MaskedReader(self._of.composition)
        header, rest = body[: reader.header_bytes], body[reader.header_bytes :]
        values = torch.cat([part.to(torch.int64) for part in reader.integers(header, [rest], 0)])
        return Vectors(values[: composition.n_levels].to(torch.int32), values[composition.n_levels :])

    # --- secrets ------------------------------------------------------------------------------------------------------

    def _opened(self, kind: ShareKind) -> Iterator[tuple[int, bytes]]:
        """Every secret of a kind of which t shares were revealed, to whomever."""
        shares: dict[int, dict[int, bytes]] = defaultdict(dict)
        for holder, revealed in self._of.revealed:
            for dealer, share in revealed.items():
                committed = self._of.dealt[dealer].dealt[holder].commitments[kind]
                try:
                    require_share(committed, self._session.digest, kind, dealer, holder, share)
                except SecAggError:
                    continue
                shares[dealer][holder] = share
        for dealer, held in shares.items():
            holders = sorted(held)[: self._session.threshold]
            if len(holders) == self._session.threshold:
                points = Interpolation(tuple(holder + 1 for holder in holders), self._session.threshold)
                yield dealer, points.secret([held[holder] for holder in holders])

    def _shared(self, one: int, other: int) -> bytes | None:
        """What two clients share, if the secret of either is known."""
        for mine, theirs in ((one, other), (other, one)):
            if mine in self._secrets[ShareKind.MASK_KEY]:
                pair = KeyPair(self._secrets[ShareKind.MASK_KEY][mine])
                return pair.shared(self._session.adverts[theirs].mask_key)
        return None

    def _guesses(self, one: int, other: int) -> Sequence[bytes | None]:
        """Keys that would not be secret. None: there is no such mask at all."""
        keys = [self._session.adverts[index].mask_key for index in sorted((one, other))]
        return (
            None,
            bytes(32),
            self._session.digest,
            sha256(b"".join(keys)).digest(),
            bytes(a ^ b for a, b in zip(*keys, strict=True)),
        )

    # --- vectors ------------------------------------------------------------------------------------------------------

    def _unmasked(self, index: int, body: bytes) -> Iterator[tuple[str, Vectors]]:
        """One client's vector without every set of masks that may be all of them."""
        others = [other for other in self._session.neighbours(index) if other in self._of.dealt]
        known = {other: shared for other in others if (shared := self._shared(index, other)) is not None}
        own = self._secrets[ShareKind.SELF_MASK].get(index)
        n_guesses = len(self._guesses(index, others[0]))
        for is_without_own, knows, guess in product((True, False), (True, False), range(n_guesses)):
            if not is_without_own and own is None:
                continue
            opened = known if knows else {}
            guessed = {other: opened.get(other) or self._guesses(index, other)[guess] for other in others}
            masks = {other: secret for other, secret in guessed.items() if secret is not None}
            how = f"self mask {'left out' if is_without_own else 'known'}, {len(opened)} pairs known, guess {guess}"
            yield how, self._without(self.read(body), index, None if is_without_own else own, masks)

    def _without(self, masked: Vectors, index: int, own: bytes | None, shared: Mapping[int, bytes]) -> Vectors:
        bits = self._of.composition.secure.bits
        levels, words = masked.levels.to(lane_dtype(bits)), masked.words.clone()
        for vector, lanes in ((Vector.LEVELS, levels), (Vector.WORDS, words)):
            keys = [] if own is None else [self_mask_key(own, self._session.digest, vector, index)]
            signs = [-1] * len(keys)
            for other, secret in shared.items():
                keys.append(pair_mask_key(secret, self._session.digest, vector, index, other))
                signs.append(-1 if other > index else 1)
            Masks(keys, signs).apply(lanes)
        return Vectors(levels.to(torch.int32), words)

    def _is_one_client(self, words: Tensor) -> bool:
        clients, weight, samples = (int(word) for word in words[:3])
        return clients == 1 and weight == samples and 1 <= samples <= self._of.composition.sample_count_max

    def _is_a_difference(self, words: Tensor) -> bool:
        clients, weight, samples = (int(word) for word in words[:3])
        return clients == 0 and weight == samples and abs(samples) <= self._of.composition.sample_count_max

    def _candidates(self, total: Vectors) -> Iterator[tuple[str, Vectors]]:
        first = {index: self.read(bodies[0]) for index, bodies in self._of.updates.items() if bodies}
        for index, vectors in first.items():
            yield f"{index} as it came", vectors
            yield f"the sum without {index}", total.minus(vectors)
            for how, found in self._unmasked(index, self._of.updates[index][0]):
                yield f"{index}, {how}", found
        for (one, mine), (other, theirs) in combinations(first.items(), 2):
            yield f"{one} - {other}", mine.minus(theirs)
            yield f"{one} + {other}", Vectors(mine.levels + theirs.levels, mine.words + theirs.words)


def _unit(values: Tensor) -> Tensor:
    """Centred, and of length 1: the product of two is their correlation."""
    centred = values.double() - values.double().mean()
    return centred / float(centred.norm())
