"""Secure rounds in virtual time: the machine that the coordinator drives, real clients, real keys and masks.

Only the clock is made up (`stage.py`), and who falls silent when (`secure_devices.py`). All clients live in one
process, so a roster's signatures are checked once, not by each of them; everything else every client does itself.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.codec.plan import CodecPlan, as_float32
from umbel.aggregation.layout import Layout
from umbel.aggregation.public_keys import public_key_text
from umbel.aggregation.round import Abandoned, Committed
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.composition import Composition
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.contribution import Contribution, LocalWork, contribution
from umbel.aggregation.secagg.plan import SecurePlan
from umbel.aggregation.secagg.server import Exchange
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.types import ClientId, RoundPlan, RunId, Weighting
from umbel.aggregation.wire import Codec
from umbel.sim.secure_coordinator import SecureCoordinator
from umbel.sim.secure_devices import Device, Luck
from umbel.sim.stage import Stage

SAMPLES_MAX = 1000
WINDOW_S = 600.0
_BITS_OF_A_LEVEL, _RMS = 16, 0.01


@dataclass(frozen=True, slots=True)
class Played:
    """How a round went. `levels` (int32, of `bits`) and `words` (int64): the sums read; None if it was abandoned.

    `took_s`: virtual. `cpu_s`: of this process, by who had it and for what. `up`, `down`: bytes of message bodies, by
    client. `refusals`: why clients have left the round, in their words.
    """

    ended: Committed | Abandoned
    levels: Tensor | None = field(repr=False)
    words: Tensor | None = field(repr=False)
    took_s: float
    cpu_s: Mapping[str, float]
    up: Mapping[ClientId, int]
    down: Mapping[ClientId, int]
    refusals: Mapping[ClientId, str]

    @property
    def exchange(self) -> Exchange | None:
        """Who has said what; None if the round was abandoned."""
        return self.ended.closing.exchange if isinstance(self.ended, Committed) else None

    @property
    def inputs(self) -> tuple[ClientId, ...]:
        """In whose sum (U3)."""
        return tuple(sorted(self.ended.closing.accepted)) if isinstance(self.ended, Committed) else ()


def secure_plan(n: int, *, bits: int, minimum: int = 3, window_s: float = WINDOW_S) -> RoundPlan:
    """A round that asks n clients, and waits for all of them until its window is over."""
    secure = SecurePlan(bits, SAMPLES_MAX, n, minimum)
    return RoundPlan(
        RunId("secure"), 1, 1, n, minimum, 1.0, window_s, Weighting.SAMPLES, SAMPLES_MAX, 64.0, seed=1, secure=secure
    )


def bits_of_sums(n: int) -> int:
    """That hold the sum of n levels of 16 bits, whatever they are."""
    return _BITS_OF_A_LEVEL + (n - 1).bit_length()


def composition_of(plan: RoundPlan, n_values: int) -> Composition:
    """For a model of one tensor."""
    assert plan.secure is not None
    codec = CodecPlan(Codec.INTEGER, as_float32(64 / _RMS), key=7)
    layout = Layout.of_state({"weights": torch.zeros(n_values)})
    return Composition(codec, plan.secure, plan.grid, SAMPLES_MAX, layout)


def made_contribution(composition: Composition, rank: int) -> Contribution:
    """A random change of the weights, by a client whose samples are known by its rank."""
    draw = torch.Generator().manual_seed(rank)
    change = torch.randn(composition.layout.n_values, generator=draw) * _RMS
    return contribution(composition, lambda: iter([change]), LocalWork(1 + rank % SAMPLES_MAX, 1, 1), rank)


def plain_sums(composition: Composition, ranks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The levels' and the words' sums of what these clients have before they mask it: Python's integers would agree."""
    levels = torch.zeros(composition.n_levels, dtype=torch.int64)
    words = torch.zeros(composition.n_words, dtype=torch.int64)
    for rank in ranks:
        one = made_contribution(composition, rank)
        levels += torch.cat(list(one.levels())).to(torch.int64)
        words += one.words
    assert int(levels.abs().max()) < 1 << (composition.secure.bits - 1), "they fit, so nothing wraps"
    return levels.to(torch.int32), words


def client_name(rank: int) -> ClientId:
    """Names in the order of their ranks, up to 100,000 of them."""
    return ClientId(f"client-{rank:05}")


def play(plan: RoundPlan, composition: Composition, luck: Sequence[Luck], seed: int = 0) -> Played:
    """One attempt, from the invitation to the sum or until it is given up. `luck`: of each client, by rank."""
    stage, devices = Stage(), dict[ClientId, Device]()
    identities = {client_name(rank): _identity(rank) for rank in range(len(luck))}
    keys = {name: public_key_text(key.public_key().public_bytes_raw()) for name, key in identities.items()}
    read_roster = lru_cache(maxsize=1)(Session.of_message)

    def invite(context: Context) -> None:
        for rank, name in enumerate(context.names):
            random = _random(f"{seed}/{name}")
            client = SecureClient(context, rank, identities[name], random, read_roster=read_roster)
            made = made_contribution(composition, rank)
            devices[name] = Device(stage, luck[rank], made, client, coordinator.hear)

    coordinator = SecureCoordinator(
        stage, plan, composition, keys, invite, lambda name, phase, body: devices[name].tell(phase, body)
    )
    coordinator.begin(_random(f"{seed}/coordinator")(48))
    stage.play(lambda: isinstance(coordinator.state, Committed | Abandoned))
    assert isinstance(coordinator.state, Committed | Abandoned), "every phase has its deadline"
    levels, words = coordinator.unmasked or (None, None)
    refusals = {name: device.refusal for name, device in devices.items() if device.refusal}
    return Played(
        coordinator.state,
        None if levels is None else lift(levels, composition.secure.bits),
        words,
        stage.now,
        stage.cpu_s,
        stage.up,
        stage.down,
        refusals,
    )


def _identity(rank: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"identity %d" % rank).digest())


def _random(seed: str) -> Callable[[int], bytes]:
    """Bytes that are the same in each run, and others at each call. For a simulation: anybody can make them again."""
    calls = count()
    return lambda n_bytes: hashlib.shake_256(f"{seed}/{next(calls)}".encode()).digest(n_bytes)
