"""A coordinator that lies: what it can make of the bytes that clients send, for tests that let an attack succeed.

Each test here that shows a defence also shows, with that defence taken out, the vector that would have come out.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from tests.aggregation.secagg.federation import Federation, identity, seeded
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.derive import Vector, pair_mask_key, self_mask_key
from umbel.aggregation.secagg.crypto.masks import Masks
from umbel.aggregation.secagg.crypto.sealed import open_sealed
from umbel.aggregation.secagg.crypto.shamir import Interpolation
from umbel.aggregation.secagg.crypto.signing import Label, sign
from umbel.aggregation.secagg.errors import OutOfTurn
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Inbox,
    Roster,
    ShareKeys,
    Unmasking,
    encode_agreements,
    encode_indices,
)
from umbel.aggregation.secagg.session import Session

N_VALUES = 64


@dataclass(frozen=True)
class Secrets:
    """All that a client draws: whoever has corrupted it has these."""

    channel: KeyPair
    mask: KeyPair
    self_mask: bytes


def secrets_of(context: Context, index: int, seed: str = "") -> Secrets:
    """Of a client that `clients_of` has made, in the order in which it draws."""
    random = seeded(f"{seed}{context.names[index]}")
    return Secrets(KeyPair(random(32)), KeyPair(random(32)), random(32))


def secret_vector(index: int, n_values: int = N_VALUES) -> Tensor:
    """What a client would keep to itself: int32."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(-1000, 1000, (n_values,), dtype=torch.int32, generator=generator)


def sum_of(indices: Iterable[int]) -> Tensor:
    return torch.stack([secret_vector(index) for index in indices]).sum(0, dtype=torch.int32)


def masked(client: SecureClient, values: Tensor | None = None) -> Tensor:
    """A client's vector as it sends it."""
    vector = secret_vector(client.index) if values is None else values.clone()
    client.masks(Vector.LEVELS).apply(vector)
    client.sign_input(hashlib.sha256(vector.numpy().tobytes()).digest())
    return vector


def opened(session: Session, shares: Mapping[int, bytes]) -> bytes:
    """The secret that these holders' shares make."""
    holders = sorted(shares)[: session.threshold]
    points = tuple(holder + 1 for holder in holders)
    return Interpolation(points, session.threshold).secret([shares[holder] for holder in holders])


def self_mask_of(session: Session, index: int, self_mask: bytes, n_values: int = N_VALUES) -> Tensor:
    """What a client adds that only it can take off again."""
    mask = torch.zeros(n_values, dtype=torch.int32)
    Masks([self_mask_key(self_mask, session.digest, Vector.LEVELS, index)], [1]).apply(mask)
    return mask


def pair_masks_of(
    session: Session, index: int, own: KeyPair, others: Collection[int], n_values: int = N_VALUES
) -> Tensor:
    """What a client adds for these others: the seed of its mask key gives it away."""
    mask = torch.zeros(n_values, dtype=torch.int32)
    for other in others:
        shared = own.shared(session.adverts[other].mask_key)
        key = pair_mask_key(shared, session.digest, Vector.LEVELS, index, other)
        Masks([key], [1 if other > index else -1]).apply(mask)
    return mask


def bare(vector: Tensor, session: Session, index: int, self_mask: bytes, own: KeyPair) -> Tensor:
    """A client's vector, once both of its secrets are known."""
    pairs = pair_masks_of(session, index, own, session.neighbours(index))
    return vector - self_mask_of(session, index, self_mask) - pairs


def advert_of(
    context: Context, index: int, channel_key: bytes, mask_key: bytes, signer: Ed25519PrivateKey
) -> AdvertiseKeys:
    """Any keys under any name, signed with whatever identity key one has."""
    unsigned = AdvertiseKeys(index, channel_key, mask_key, b"")
    return replace(unsigned, signature=sign(signer, Label.ADVERTISE_KEYS, context.digest, unsigned.payload))


def forged_advert(context: Context, index: int, secrets: Secrets) -> AdvertiseKeys:
    """The coordinator's own keys as another's."""
    return advert_of(context, index, secrets.channel.public, secrets.mask.public, identity("the coordinator"))


def roster_of(federation: Federation, adverts: Iterable[AdvertiseKeys], opening: bytes | None = None) -> bytes:
    """The roster message with these adverts instead of those that were sent."""
    listed = tuple(sorted(adverts, key=lambda one: one.index))
    return Roster(federation.session.opening if opening is None else opening, listed).encode()


def shares_for(dealt: ShareKeys, session: Session, holder: int, secrets: Secrets) -> tuple[bytes, bytes]:
    """What a corrupt holder reads of a dealer's message: its shares of b and of the mask key's seed."""
    shared = secrets.channel.shared(session.adverts[dealt.index].channel_key)
    return open_sealed(shared, session.digest, dealt.index, holder, dealt.dealt[holder].sealed)


def inbox_of(federation: Federation, index: int, shared: Collection[int], dealt: Mapping[int, ShareKeys]) -> bytes:
    """An inbox that says these have shared."""
    return Inbox(tuple(sorted(shared)), {dealer: one.dealt[index] for dealer, one in dealt.items()}).encode()


def revealed(client: SecureClient, signatures: Mapping[int, bytes]) -> Mapping[int, bytes]:
    """What a client answers to these agreements: shares, by dealer."""
    answer = client.reveal(encode_agreements(signatures))
    return Unmasking.decode(answer, client.index, len(client.context.cohort)).shares


def agreed(client: SecureClient, inputs: Collection[int]) -> bytes:
    """A client's signature of this U3."""
    return client.agree(encode_indices(inputs))


def corrupt_signature(session: Session, index: int, shared: Collection[int], inputs: Collection[int]) -> bytes:
    """A corrupt client signs whatever it is asked to."""
    payload = session.consistency_payload(shared, inputs)
    return sign(identity(session.context.names[index]), Label.CONSISTENCY, session.digest, payload)


def split_view(federation: Federation, victim: int, alive: Collection[int], dead: Collection[int]) -> Tensor:
    """Tell some honest clients that the victim is in the sum, others that it is not; its vector, of what they say.

    Everyone else is corrupt, and says both. The federation has come as far as the masks.
    """
    session, shared, context = federation.session, federation.shared, federation.context
    views = {"alive": (shared, alive), "dead": (tuple(index for index in shared if index != victim), dead)}
    corrupt = {index: secrets_of(context, index) for index in shared if index not in {*alive, *dead}}
    vectors = {index: masked(federation.clients[index]) for index in (*alive, *dead)}
    signed = dict[str, dict[int, bytes]]()
    for view, (inputs, honest) in views.items():
        signed[view] = {index: corrupt_signature(session, index, shared, inputs) for index in corrupt}
        signed[view] |= {index: agreed(federation.clients[index], inputs) for index in honest}
    dealt = federation.dealt[victim]
    pairs = {index: shares_for(dealt, session, index, secrets) for index, secrets in corrupt.items()}
    secret = dict[str, bytes]()
    for kind, (view, (_, honest)) in enumerate(views.items()):
        shares = {index: revealed(federation.clients[index], signed[view])[victim] for index in honest}
        secret[view] = opened(session, shares | {index: pair[kind] for index, pair in pairs.items()})
    return bare(vectors[victim], session, victim, secret["alive"], KeyPair(secret["dead"]))


def advertised(n: int, **changed: object) -> Federation:
    """A federation of n that has come as far as the roster, honestly."""
    federation = Federation.of(n, **changed)
    federation.advertise()
    return federation


def heard(n: int, **changed: object) -> Federation:
    """A federation of n that has come as far as the masks, honestly."""
    federation = advertised(n, **changed)
    federation.share()
    federation.hear()
    return federation


def in_the_sum(n: int, inputs: Collection[int]) -> Federation:
    """Of n these have sent their vectors, and agreed."""
    federation = heard(n)
    for index in inputs:
        masked(federation.clients[index])
    federation.inputs = tuple(inputs)
    federation.agree()
    return federation


def require_silent(client: SecureClient) -> None:
    """After a refusal a client says nothing more, whatever it is asked."""
    for step in (client.share, client.hear, client.sign_input, client.agree, client.reveal):
        with pytest.raises(OutOfTurn):
            step(b"")
    with pytest.raises(OutOfTurn):
        client.advertise()
    with pytest.raises(OutOfTurn):
        client.masks(Vector.LEVELS)


def without_signatures(patch: pytest.MonkeyPatch) -> None:
    """Take the check of signatures out of both ends."""
    for module in ("session", "client"):
        patch.setattr(f"umbel.aggregation.secagg.{module}.check_signature", lambda *_: None)
