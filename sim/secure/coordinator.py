"""The coordinator of a simulated secure round: the machine, its deadlines, and what it tells whom in each phase."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping

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
    Spoke,
    Tick,
    Training,
)
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.derive import SIGNATURE_BYTES
from umbel.aggregation.secagg.messages import AdvertiseKeys, Indices, encode_agreements, encode_indices
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.secagg.unmasking import Sum
from umbel.aggregation.types import ClientId
from umbel.sim.secure.devices import Message
from umbel.sim.secure.masking import Masking
from umbel.sim.secure.stage import Stage

_SHA256 = "ab" * 32  # of what all are asked: here it is never two things
_WORK = MaskedInput(_SHA256, base64.b64encode(bytes(SIGNATURE_BYTES)).decode())


def context_of(opened: Training, keys: Mapping[ClientId, str], layout: Layout) -> Context:
    """What all members of an attempt agree on. `keys`: identity keys (base64), of the cohort at least."""
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


class SecureCoordinator:
    """Drives one attempt from its opening until its sum can be unmasked, or it is given up.

    `tell` and `release` reach the clients: what one needs to speak in a phase, and that one is to stop.
    Raises `SecAggError` for a message that is not as it should be: its clients are honest.
    """

    def __init__(
        self,
        stage: Stage,
        opened: Training,
        context: Context,
        masking: Masking,
        tell: Callable[[ClientId, Phase, bytes], None],
        release: Callable[[ClientId], None],
    ) -> None:
        self.state: Training | Closing | Abandoned = opened
        self.is_unmasked = False
        self._stage, self._context, self._masking = stage, context, masking
        self._tell, self._release = tell, release
        self._revealed = list[ClientId]()
        self._shared: Indices = ()
        self._inputs: Indices = ()
        self._deadline: float | None = None
        self._await_deadline()

    @property
    def is_over(self) -> bool:
        return self.is_unmasked or isinstance(self.state, Abandoned)

    def hear(self, message: Message) -> None:
        """Take a message, if it is its turn."""
        with self._stage.counting(f"coordinator: {message.phase}"):
            match message.phase:
                case Phase.MASKED_INPUT:
                    self._hear_input(message)
                case Phase.UNMASKING:
                    self._hear_shares(message)
                case _:
                    self._hear_word(message)

    # --- words --------------------------------------------------------------------------------------------------------

    def _hear_word(self, message: Message) -> None:
        is_hash = message.phase is Phase.SHARE_KEYS
        word = hashlib.sha256(message.body).hexdigest() if is_hash else base64.b64encode(message.body).decode()
        event = Spoke(self._stage.now, message.client, message.phase, word)
        if not hears(self.state, event):
            return
        index = self._context.index_of(message.client)
        match message.phase:
            case Phase.ADVERTISE_KEYS:
                self._masking.hear_keys(self._context, AdvertiseKeys.decode(message.body))
            case Phase.SHARE_KEYS:
                self._masking.hear_shares(self._session, index, message.body)
            case _:
                self._masking.hear_agreement(self._session, index, self._agreed_payload, message.body)
        self._step(event)

    # --- vectors and shares -------------------------------------------------------------------------------------------

    def _hear_input(self, message: Message) -> None:
        if message.declined:
            self._step(Declined(self._stage.now, message.client, message.declined))
            return
        event = Reported(self._stage.now, message.client, _WORK)
        if takes(self.state, event):
            index = self._context.index_of(message.client)
            self._masking.hear_input(self._session, self._shared, index, message.body, message.signature)
        self._step(event)

    def _hear_shares(self, message: Message) -> None:
        if not isinstance(self.state, Closing) or self._exchange.phase is not Phase.UNMASKING:
            return
        index, of = self._context.index_of(message.client), Sum(self._shared, self._inputs)
        self._revealed.append(message.client)
        self.is_unmasked = self._masking.hear_revealed(self._session, of, index, message.body)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        state, commands = advance(self.state, event)
        assert isinstance(state, Training | Closing | Abandoned), "what is made of the sum is not said here"
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
            with self._stage.counting("coordinator: deadlines"):
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
        """A phase has begun: work out what it needs, and tell it to everyone who is in it."""
        if isinstance(self.state, Abandoned):
            return
        context, exchange = self._context, self._exchange
        indices = tuple(sorted(context.index_of(client) for client in clients))
        body = b""
        match exchange.phase:
            case Phase.SHARE_KEYS:
                adverts = (base64.b64decode(exchange.said(context.names[i], Phase.ADVERTISE_KEYS)) for i in indices)
                by_index = {i: AdvertiseKeys.decode(advert) for i, advert in zip(indices, adverts, strict=True)}
                self._session = Session(context, bytes.fromhex(exchange.opening), by_index)
                body = self._session.roster().encode()
            case Phase.MASKED_INPUT:
                self._shared = indices
            case Phase.CONSISTENCY_CHECK:
                self._inputs = indices
                self._agreed_payload = self._session.consistency_payload(self._shared, indices)
                body = encode_indices(indices)
            case _:
                signatures = ((context.names[i], i) for i in indices)
                said = {i: exchange.said(name, Phase.CONSISTENCY_CHECK) for name, i in signatures}
                body = encode_agreements({i: base64.b64decode(word) for i, word in said.items()})
        for index in indices:
            if exchange.phase is Phase.MASKED_INPUT:
                body = self._masking.inbox(self._session, index, indices)
            self._tell(context.names[index], exchange.phase, body)

    @property
    def _exchange(self) -> Exchange:
        assert isinstance(self.state, Training | Closing)
        assert self.state.exchange is not None
        return self.state.exchange
