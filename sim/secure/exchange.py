"""One attempt at a secure round in virtual time, from its opening until its sum can be unmasked or it is abandoned."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.states import Abandoned, Closing, Training
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId
from umbel.sim.secure.coordinator import MaskedSum, SimulatedCoordinator, context_of
from umbel.sim.secure.devices import DeviceFate, SecureDevice, VirtualTime, Voice
from umbel.sim.secure.voices import CountingCoordinator


@dataclass(frozen=True, slots=True)
class ExchangeParties:
    """The parties of an attempt."""

    luck: Mapping[ClientId, DeviceFate]
    voice: Callable[[ClientId, SecureClient], Voice]  # a client's messages, with the keys of that `SecureClient`
    seed: str  # of all keys
    total: MaskedSum | None = None  # takes the masked updates; None for blank messages
    declines: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])  # clients without update, and why


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The result: `state` is `Closing` if `party` can unmask the sum now."""

    state: Closing | Abandoned
    devices: Mapping[ClientId, SecureDevice]
    party: SecureCoordinator


def exchange(stage: VirtualTime, opened: Training, layout: Layout, cast: ExchangeParties) -> Exchanged:
    """Play the attempt. `stage`: at the time of its opening; `layout`: of the model."""
    identities = {name: _identity(name) for name in sorted(opened.cohort)}
    keys = {name: public_key_text(one.public_key().public_bytes_raw()) for name, one in identities.items()}
    context, read_roster = context_of(opened, keys, layout), lru_cache(maxsize=1)(Session.of_message)
    devices, opening = dict[ClientId, SecureDevice](), bytes.fromhex(opened.exchange.opening if opened.exchange else "")
    party = (CountingCoordinator if cast.total is None else SecureCoordinator)(context, opening)
    coordinator = SimulatedCoordinator(
        stage,
        opened,
        party,
        cast.total,
        lambda name, phase, body: devices[name].tell(phase, body),
        lambda name: devices[name].release(),
    )
    for index, (name, identity) in enumerate(identities.items()):
        random = seeded_bytes(f"{cast.seed}/{name}")
        client = SecureClient(context, index, identity, random, read_roster=read_roster)
        voice, why = cast.voice(name, client), cast.declines.get(name, "")
        devices[name] = SecureDevice(stage, name, cast.luck[name], voice, coordinator.hear, why)
    stage.play(lambda: coordinator.is_over)
    assert coordinator.is_over, "every phase has its deadline"
    assert not isinstance(coordinator.state, Training)
    return Exchanged(coordinator.state, devices, party)


def seeded_bytes(seed: str) -> Callable[[int], bytes]:
    """Repeatable bytes that differ from call to call. Not secret: for simulations only."""
    calls = count()
    return lambda n_bytes: hashlib.shake_256(f"{seed}/{next(calls)}".encode()).digest(n_bytes)


@lru_cache(maxsize=4096)
def _identity(name: ClientId) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"identity of {name}".encode()).digest())
