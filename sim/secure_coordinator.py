"""The coordinator of a simulated secure round: the machine, what it keeps of the messages, and the one sum."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from umbel.aggregation.advance import advance, hears, next_deadline, takes
from umbel.aggregation.integer_sum import IntegerSum
from umbel.aggregation.round import (
    Announce,
    Applied,
    Closing,
    Command,
    Event,
    Fold,
    Gathered,
    Invite,
    Recruiting,
    Reported,
    RoundState,
    Spoke,
    Tick,
    Training,
)
from umbel.aggregation.secagg.composition import Composition
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.masked_input import MaskedReader, unmasked
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Inbox,
    ShareKeys,
    Unmasking,
    encode_agreements,
    encode_indices,
)
from umbel.aggregation.secagg.server import Exchange, Phase
from umbel.aggregation.secagg.session import Session, check_advert, check_signature
from umbel.aggregation.secagg.signing import Label
from umbel.aggregation.secagg.unmasking import Sum, Unmasker
from umbel.aggregation.types import ClientId, RoundPlan, WorkDone
from umbel.aggregation.weighting import Candidate
from umbel.sim.secure_devices import Message
from umbel.sim.stage import Stage

_WORK = WorkDone(1, 1, 1, "0" * 64)
_SHA256 = "ab" * 32


class SecureCoordinator:
    """Drives one round. `keys`: identity keys (base64) of all who wait; `invite` and `tell` reach the clients.

    Raises `SecAggError` for a message that is not as it should be: its clients are honest.
    """

    def __init__(
        self,
        stage: Stage,
        plan: RoundPlan,
        composition: Composition,
        keys: Mapping[ClientId, str],
        invite: Callable[[Context], None],
        tell: Callable[[ClientId, Phase, bytes], None],
    ) -> None:
        self.state: RoundState = Recruiting(plan, since=stage.now)
        self.unmasked: tuple[Tensor, Tensor] | None = None
        self._stage, self._plan, self._composition, self._keys = stage, plan, composition, keys
        self._invite, self._tell = invite, tell
        self._reader = MaskedReader(composition)
        self._total: IntegerSum = self._reader.new_sum()
        self._dealt: dict[int, ShareKeys] = {}
        self._deadline: float | None = None

    def begin(self, random: bytes) -> None:
        """Draw the cohort. `random`: 48 bytes that nobody can guess."""
        self._step(Gathered(self._stage.now, tuple(Candidate(name, 1) for name in sorted(self._keys)), random))

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
                check_advert(self._context, AdvertiseKeys.decode(message.body))
            case Phase.SHARE_KEYS:
                dealt = ShareKeys.decode(message.body, index, self._session.neighbours(index))
                self._session.check_shares(dealt)
                self._dealt[index] = dealt
            case _:
                self._check(index, Label.CONSISTENCY, self._agreed_payload, message.body)
        self._step(event)

    def _check(self, index: int, label: Label, payload: bytes, signature: bytes) -> None:
        check_signature(self._context, index, label, self._session.digest, payload, signature)

    # --- vectors and shares -------------------------------------------------------------------------------------------

    def _hear_input(self, message: Message) -> None:
        event = Reported(self._stage.now, message.client, _WORK)
        if takes(self.state, event):
            sha256 = hashlib.sha256(message.body).digest()
            payload = self._session.input_payload(self._shared, sha256)
            self._check(self._context.index_of(message.client), Label.MASKED_INPUT, payload, message.signature)
        self._step(event, message.body)

    def _fold(self, update: bytes, weight: int) -> None:
        head, body = update[: self._reader.header_bytes], update[self._reader.header_bytes :]
        self._total.add(self._reader.integers(head, [body], 0), weight)

    def _hear_shares(self, message: Message) -> None:
        if not isinstance(self.state, Closing) or self._exchange.phase is not Phase.UNMASKING:
            return
        index = self._context.index_of(message.client)
        self._unmasker.take(Unmasking.decode(message.body, index, len(self._context.cohort)))
        if self._unmasker.is_enough:
            self.unmasked = unmasked(self._total, self._composition, self._unmasker.open())
            self._step(Applied(self._stage.now, _SHA256))

    # --- the machine --------------------------------------------------------------------------------------------------

    def _step(self, event: Event, update: bytes = b"") -> None:
        self.state, commands = advance(self.state, event)
        for command in commands:
            self._carry_out(command, update)
        deadline = next_deadline(self.state, self._stage.now)
        if deadline is not None and deadline != self._deadline:
            self._stage.plan(deadline, self._tick)
        self._deadline = deadline

    def _tick(self) -> None:
        if self._deadline is not None and self._stage.now >= self._deadline:
            with self._stage.counting("coordinator: deadlines"):
                self._step(Tick(self._stage.now))

    def _carry_out(self, command: Command, update: bytes) -> None:
        match command:
            case Invite(clients):
                self._context = self._context_of(sorted(clients))
                self._invite(self._context)
            case Fold(weight=weight):
                self._fold(update, weight)
            case Announce(clients):
                self._announce(clients)
            case _:
                pass

    def _announce(self, clients: Iterable[ClientId]) -> None:
        """A phase has begun: work out what it needs, and tell it to everyone who is in it."""
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
                self._unmasker = Unmasker(self._session, Sum(self._shared, self._inputs), self._dealt)
        for index in indices:
            own = self._inbox(index) if exchange.phase is Phase.MASKED_INPUT else body
            self._tell(context.names[index], exchange.phase, own)

    def _inbox(self, index: int) -> bytes:
        dealers = self._dealt.keys() & set(self._session.neighbours(index))
        return Inbox(self._shared, {dealer: self._dealt[dealer].dealt[index] for dealer in dealers}).encode()

    @property
    def _exchange(self) -> Exchange:
        assert isinstance(self.state, Training | Closing)
        assert self.state.exchange is not None
        return self.state.exchange

    def _context_of(self, names: Sequence[ClientId]) -> Context:
        exchange, plan = self._exchange, self._plan
        return Context(
            run=plan.run,
            round=plan.number,
            attempt=plan.attempt,
            attempt_id=exchange.attempt_id,
            model_sha256=_SHA256,
            layout_digest=self._composition.layout.digest,
            config_sha256=_SHA256,
            members_sha256="",
            cohort=tuple((name, self._keys[name]) for name in names),
            minimum=plan.minimum,
            opening_commitment=hashlib.sha256(bytes.fromhex(exchange.opening)).hexdigest(),
            window_s=plan.window_s,
        )
