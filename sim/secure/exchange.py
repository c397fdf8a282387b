"""One attempt at a secure round in virtual time, from its opening until its sum can be unmasked or it is abandoned."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.reports import MaskedInput
from umbel.aggregation.round.machine import advance, hears, next_deadline, takes
from umbel.aggregation.round.states import (
    Abandoned,
    Announce,
    Closing,
    Command,
    Declined,
    Event,
    Release,
    Reported,
    Revealed,
    Silent,
    Spoke,
    Tick,
    Training,
)
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.crypto.derive import SIGNATURE_BYTES
from umbel.aggregation.secagg.messages import AdvertiseKeys, ShareKeys
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId
from umbel.sim.secure.devices import DeviceFate, SecureDevice, SecureMessage, VirtualTime
from umbel.sim.secure.voices import Masking

_SHA256 = "ab" * 32  # of model and configuration, which never differ here
_WORK = MaskedInput(_SHA256, base64.b64encode(bytes(SIGNATURE_BYTES)).decode())


def context_of(opened: Training, keys: Mapping[ClientId, str], layout: Layout) -> Context:
    """The context of an attempt. `keys`: identity keys (base64) of the cohort."""
    plan, exchange = opened.plan, opened.exchange
    assert exchange is not None, "it is a secure one"
    return Context(
        run=plan.run,
        round=plan.number,
        attempt=plan.attempt,
        attempt_id=exchange.attempt_id,
        model_sha256=_SHA256,
        layout_digest=layout.digest,
        config_sha256=_SHA256,
        members_sha256="",
        cohort=tuple((name, keys[name]) for name in sorted(opened.cohort)),
        minimum=plan.minimum,
        opening_commitment=hashlib.sha256(bytes.fromhex(exchange.opening)).hexdigest(),
        window_s=plan.window_s,
    )


def simulated_context(opened: Training, layout: Layout) -> Context:
    """The context of an attempt among simulated clients, whose identity keys follow from their names."""
    keys = {name: public_key_text(_identity(name).public_key().public_bytes_raw()) for name in opened.cohort}
    return context_of(opened, keys, layout)


class SimulatedCoordinator:
    """Drives one attempt from its opening until its sum can be unmasked, or it is abandoned.

    `party`: its side of the protocol. `masking`: takes the masked updates. `tell` sends a client what it needs in a
    phase, `release` stops it. Raises `SecAggError` for a wrong message, since the simulated clients are honest.
    """

    def __init__(
        self,
        stage: VirtualTime,
        opened: Training,
        party: SecureCoordinator,
        masking: Masking,
        tell: Callable[[ClientId, Phase, bytes, Sequence[ClientId]], None],
        release: Callable[[ClientId], None],
    ) -> None:
        self.state: Training | Closing | Abandoned = opened
        self.is_unmasked = False
        self._stage, self._party, self._masking = stage, party, masking
        self._tell, self._release = tell, release
        self._adverts = dict[int, AdvertiseKeys]()
        self._dealt = dict[int, ShareKeys]()
        self._revealed = list[ClientId]()
        self._silent = set[ClientId]()
        self._deadline: float | None = None
        self._await_deadline()

    @property
    def is_over(self) -> bool:
        return self.is_unmasked or isinstance(self.state, Abandoned)

    def hear(self, message: SecureMessage) -> None:
        """Take a message, if its phase is open, or the refusal to send it."""
        self._take(message)
        self._look_for_silence()

    def miss(self, client: ClientId) -> None:
        """This client has been silent for so long that the round no longer waits for it."""
        self._silent.add(client)
        self._look_for_silence()

    def _look_for_silence(self) -> None:
        if self._silent and isinstance(self.state, Training):
            self._step(Silent(self._stage.now, frozenset(self._silent)))

    def _take(self, message: SecureMessage) -> None:
        if message.declined:
            self._step(Declined(self._stage.now, message.client, message.declined))
            return
        match message.phase:
            case Phase.MASKED_INPUT:
                self._hear_input(message)
            case Phase.UNMASKING:
                self._hear_shares(message)
            case _:
                self._hear_word(message)

    # --- words --------------------------------------------------------------------------------------------------------

    def _hear_word(self, message: SecureMessage) -> None:
        is_hash = message.phase is Phase.SHARE_KEYS
        word = hashlib.sha256(message.body).hexdigest() if is_hash else base64.b64encode(message.body).decode()
        event = Spoke(self._stage.now, message.client, message.phase, word)
        if not hears(self.state, event):
            return
        index = self._party.context.index_of(message.client)
        match message.phase:
            case Phase.ADVERTISE_KEYS:
                self._adverts[index] = self._party.check_keys(index, message.body)
            case Phase.SHARE_KEYS:
                self._dealt[index] = self._party.check_shares(index, message.body)
            case _:
                self._party.check_agreement(index, message.body)
        self._step(event)

    # --- vectors and shares -------------------------------------------------------------------------------------------

    def _hear_input(self, message: SecureMessage) -> None:
        event = Reported(self._stage.now, message.client, _WORK)
        if takes(self.state, event):
            index = self._party.context.index_of(message.client)
            self._masking.take(self._party, index, message.body, message.signature)
        self._step(event)

    def _hear_shares(self, message: SecureMessage) -> None:
        if not isinstance(self.state, Closing) or self._exchange.phase is not Phase.UNMASKING:
            return
        self._revealed.append(message.client)
        self._party.take_shares(self._party.context.index_of(message.client), message.body)
        self.is_unmasked = self._party.is_enough

    # --- the machine --------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        state, commands = advance(self.state, event)
        assert isinstance(state, Training | Closing | Abandoned), "the sum is used elsewhere"
        self.state = state
        for command in commands:
            self._carry_out(command)
        self._await_deadline()

    def _await_deadline(self) -> None:
        deadline = next_deadline(self.state, self._stage.now)
        if deadline is not None and deadline != self._deadline:
            self._stage.plan(deadline, self._tick)
        self._deadline = deadline

    def _tick(self) -> None:
        if self._deadline is not None and self._stage.now >= self._deadline:
            self._step(Tick(self._stage.now, Revealed(tuple(sorted(self._revealed)))))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Announce(clients):
                self._announce(clients)
            case Release(clients):
                for client in clients:
                    self._release(client)
            case _:
                pass

    def _announce(self, clients: Iterable[ClientId]) -> None:
        """Begin a phase: send every client in it what it needs."""
        if isinstance(self.state, Abandoned):
            return
        party, phase = self._party, self._exchange.phase
        indices = sorted(map(party.context.index_of, clients))
        match phase:
            case Phase.SHARE_KEYS:
                party.close_roster(self._adverts[index] for index in indices)
                body = party.roster()
            case Phase.MASKED_INPUT:
                party.close_shares(indices)
                party.load_shares({index: self._dealt[index] for index in indices})
                body = b""
            case Phase.CONSISTENCY_CHECK:
                party.close_inputs(indices)
                body = party.inputs()
            case _:
                of_index = {index: party.context.names[index] for index in indices}
                said = {index: self._exchange.said(name, Phase.CONSISTENCY_CHECK) for index, name in of_index.items()}
                body = party.agreements({index: base64.b64decode(word) for index, word in said.items()})
        names = [party.context.names[index] for index in indices]
        for index, name in zip(indices, names, strict=True):
            self._tell(name, phase, party.inbox(index) if phase is Phase.MASKED_INPUT else body, names)

    @property
    def _exchange(self) -> Exchange:
        assert isinstance(self.state, Training | Closing)
        assert self.state.exchange is not None
        return self.state.exchange


@dataclass(frozen=True, slots=True)
class ExchangeParties:
    """The parties of an attempt."""

    luck: Mapping[ClientId, DeviceFate]
    masking: Masking  # of this attempt alone
    seed: str  # of all keys
    declines: Mapping[ClientId, str] = field(default_factory=dict[ClientId, str])  # clients without update, and why
    refusal: Callable[[ClientId, Phase, Sequence[ClientId]], str] = lambda _client, _phase, _clients: ""  # of a message
    silent_at: Mapping[ClientId, float] = field(default_factory=dict[ClientId, float])  # of clients lost at work


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The result: `state` is `Closing` if `party` can unmask the sum now."""

    state: Closing | Abandoned
    devices: Mapping[ClientId, SecureDevice]
    party: SecureCoordinator


def exchange(stage: VirtualTime, opened: Training, layout: Layout, cast: ExchangeParties) -> Exchanged:
    """Play the attempt. `stage`: at the time of its opening; `layout`: of the model."""
    identities = {name: _identity(name) for name in sorted(opened.cohort)}
    context, read_roster = simulated_context(opened, layout), lru_cache(maxsize=1)(Session.of_message)
    devices, opening = dict[ClientId, SecureDevice](), bytes.fromhex(opened.exchange.opening if opened.exchange else "")
    party = cast.masking.coordinator(context, opening)
    coordinator = SimulatedCoordinator(
        stage,
        opened,
        party,
        cast.masking,
        lambda name, phase, body, clients: devices[name].tell(phase, body, clients),
        lambda name: devices[name].release(),
    )
    for index, (name, identity) in enumerate(identities.items()):
        random = seeded_bytes(f"{cast.seed}/{name}")
        client = SecureClient(context, index, identity, random, read_roster=read_roster)
        voice, why, refuses = cast.masking.voice(client), cast.declines.get(name, ""), partial(cast.refusal, name)
        devices[name] = SecureDevice(stage, name, cast.luck[name], voice, coordinator.hear, why, refuses)
    for name, at in cast.silent_at.items():
        stage.plan(at, partial(coordinator.miss, name))
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
