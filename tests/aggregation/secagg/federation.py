"""A whole secure round in one process, without a coordinator's machine: for tests that take a single step apart."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    ShareKeys,
    encode_indices,
)
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.secagg.unmasking import Opened, Unmasker
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId, RunId

OPENING = bytes(range(32))


def seeded(seed: str) -> Callable[[int], bytes]:
    """Bytes that differ with each call and are the same in each run of the tests."""
    count = 0

    def random(n_bytes: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_256(f"{seed}/{count}".encode()).digest(n_bytes)

    return random


def identity(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"identity of {name}".encode()).digest())


def context_of(n: int, **changed: Any) -> Context:
    names = [ClientId(f"client-{i:04}") for i in range(n)]
    cohort = tuple((name, public_key_text(identity(name).public_key().public_bytes_raw())) for name in names)
    context = Context(
        run=RunId("ward"),
        round=1,
        attempt=1,
        attempt_id="0f" * 16,
        model_sha256="ab" * 32,
        layout_digest="cd" * 32,
        config_sha256="ef" * 32,
        members_sha256="",
        cohort=cohort,
        minimum=3,
        opening_commitment=hashlib.sha256(OPENING).hexdigest(),
        window_s=600.0,
    )
    return replace(context, **changed)


def clients_of(context: Context, seed: str = "") -> dict[int, SecureClient]:
    return {
        index: SecureClient(context, index, identity(name), seeded(f"{seed}{name}"))
        for index, name in enumerate(context.names)
    }


@dataclass
class Federation:
    """A coordinator that does as it should; each step can be looked at, or done otherwise."""

    context: Context
    clients: dict[int, SecureClient] = field(default_factory=dict[int, SecureClient])
    adverts: dict[int, AdvertiseKeys] = field(default_factory=dict[int, AdvertiseKeys])
    dealt: dict[int, ShareKeys] = field(default_factory=dict[int, ShareKeys])
    inputs: tuple[int, ...] = ()
    agreed: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @classmethod
    def of(cls, n: int, **changed: Any) -> "Federation":
        context = context_of(n, **changed)
        return cls(context, clients_of(context))

    @property
    def party(self) -> SecureCoordinator:
        """The coordinator, told all that has been said so far."""
        party = SecureCoordinator(self.context, OPENING)
        party.close_roster(self.adverts.values())
        party.close_shares(self.dealt)
        party.load_shares(self.dealt)
        party.close_inputs(self.inputs)
        return party

    @property
    def session(self) -> Session:
        return self.party.session

    @property
    def shared(self) -> tuple[int, ...]:
        return tuple(sorted(self.dealt))

    @property
    def roster(self) -> bytes:
        return self.party.roster()

    def advertise(self, without: Collection[int] = ()) -> None:
        for index, client in self.clients.items():
            if index not in without:
                self.adverts[index] = AdvertiseKeys.decode(client.advertise())

    def share(self, without: Collection[int] = ()) -> None:
        party = self.party
        for index in self.adverts:
            if index not in without:
                self.dealt[index] = party.check_shares(index, self.clients[index].share(party.roster()))

    def inbox(self, index: int) -> bytes:
        return self.party.inbox(index)

    def hear(self) -> None:
        party = self.party
        for index in self.dealt:
            self.clients[index].hear(party.inbox(index))

    def mask(self, vectors: Mapping[int, Tensor], vector: Vector = Vector.LEVELS) -> Tensor:
        """The sum of these clients' vectors, masked."""
        total = torch.zeros_like(next(iter(vectors.values())))
        for index, values in vectors.items():
            masked = values.clone()
            self.clients[index].masks(vector).apply(masked)
            self.clients[index].sign_input(hashlib.sha256(masked.numpy().tobytes()).digest())
            total += masked
        self.inputs = tuple(sorted(vectors))
        return total

    def agree(self, without: Collection[int] = ()) -> None:
        for index in self.inputs:
            if index not in without:
                self.agreed[index] = self.clients[index].agree(encode_indices(self.inputs))

    def unmasker(self) -> Unmasker:
        return Unmasker(self.session, self.shared, self.inputs, self.dealt)

    def reveal(self, without: Collection[int] = ()) -> Opened:
        party = self.party
        for index in self.agreed:
            if index not in without:
                party.take_shares(index, self.clients[index].reveal(party.agreements(self.agreed)))
        return party.open()
