"""A run's secure round under way, as this replica knows it: messages checked, made and told; shares that are revealed.

What is stored of it is in the round's state (`Exchange`) and in the table of sealed shares. What clients reveal, and
what is made of that, is in this object's memory alone: after a restart they are asked again, and say the same.
"""

import base64
import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from umbel.aggregation.phrases import some
from umbel.aggregation.reports import MaskedInput
from umbel.aggregation.round.states import Closing, Committed, Revealed, RoundState, Training
from umbel.aggregation.secagg.agreement import context_of
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.signing import Label
from umbel.aggregation.secagg.errors import ChangedMessage, SecAggError
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Inbox,
    ShareKeys,
    Unmasking,
    encode_agreements,
    encode_indices,
)
from umbel.aggregation.secagg.session import Session, check_advert, check_signature
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.secagg.unmasking import Opened, Sum, Unmasker
from umbel.aggregation.types import ClientId
from umbel.server.problems import Refused
from umbel.server.runs.assignments import Assignments
from umbel.server.services import Services
from umbel.server.store.stored import LiveRun
from umbel.server.sums.relay import Relay

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """What is known of one attempt, made as it is asked for."""

    round_id: int
    context: Context
    session: Session | None = None
    dealt: Mapping[int, ShareKeys] | None = None
    unmasker: Unmasker | None = None
    relay: Relay | None = None


class SecureRounds:
    """The secure round of a run's newest attempt. Ask with the run as it is at that moment."""

    def __init__(self, services: Services, assignments: Assignments) -> None:
        self._services = services
        self._assignments = assignments
        self._known: _Known | None = None

    def forget(self) -> None:
        """The attempt is over: let go of all that was revealed."""
        self._known = None

    # --- what clients say ---------------------------------------------------------------------------------------------

    async def check(self, live: LiveRun, client: ClientId, phase: Phase, body: bytes) -> str:
        """The word to keep of a client's message. Raises `Refused` for one that is not what it should be."""
        known, exchange = await self._of(live), _exchange_in(live.state)
        index = known.context.index_of(client)
        try:
            match phase:
                case Phase.ADVERTISE_KEYS:
                    advert = AdvertiseKeys.decode(body)
                    _require_own(advert.index == index)
                    check_advert(known.context, advert)
                    return base64.b64encode(body).decode()
                case Phase.SHARE_KEYS:
                    session = self._session(known, exchange)
                    session.check_shares(ShareKeys.decode(body, index, session.neighbours(index)))
                    return hashlib.sha256(body).hexdigest()
                case Phase.CONSISTENCY_CHECK:
                    session, shared, inputs = (
                        self._session(known, exchange),
                        _shared(known, exchange),
                        _inputs(known, live),
                    )
                    payload = session.consistency_payload(shared, inputs)
                    check_signature(known.context, index, Label.CONSISTENCY, session.digest, payload, body)
                    return base64.b64encode(body).decode()
                case _:
                    raise Refused("malformed-request", f"{phase.value} has no message of this kind")
        except (SecAggError, ValueError) as error:
            raise Refused("malformed-request", f"the message of {phase.value} is refused: {error}") from error

    async def check_input(self, live: LiveRun, client: ClientId, work: MaskedInput) -> None:
        """Raise `Refused` unless the client has signed the masked vector that it reports.

        Of one whose vector could not count whatever it is, nothing is checked: the round's machine tells it so.
        """
        known, exchange = await self._of(live), _exchange_in(live.state)
        if client not in exchange.masked:
            return
        session, index = self._session(known, exchange), known.context.index_of(client)
        payload = session.input_payload(_shared(known, exchange), bytes.fromhex(work.update_sha256))
        signature = base64.b64decode(work.signature)
        try:
            check_signature(known.context, index, Label.MASKED_INPUT, session.digest, payload, signature)
        except SecAggError as error:
            raise Refused("report-refused", str(error)) from error

    async def reveal(self, live: LiveRun, client: ClientId, body: bytes) -> bool:
        """Take in the shares that a client reveals: whether they had not come before.

        Before it is their turn they are not taken: only who has seen that all have signed the same sum reveals any.
        Raises `Refused`, naming the liar where that can be told.
        """
        if _exchange_in(live.state).phase is not Phase.UNMASKING:
            raise Refused("assignment-closed", "no shares are to be revealed yet; see what the round is at")
        known = await self._of(live)
        index = known.context.index_of(client)
        try:
            is_new = await self._take(live, index, body)
        except ChangedMessage as error:
            raise Refused("changed-message", str(error)) from error
        except SecAggError as error:
            _log.warning("run %s, round %d: %s", live.name, live.plan.number, error)
            raise Refused("malformed-request", f"these shares are refused: {error}") from error
        if (relay := self._relay(known, live)) is not None:
            relay.hear(index, body)
        return is_new

    # --- what they are told -------------------------------------------------------------------------------------------

    async def tell(self, live: LiveRun, client: ClientId, phase: Phase) -> bytes | None:
        """What a client needs for its turn in a phase; None before that has come."""
        exchange = _exchange_in(live.state)
        if phase is Phase.ADVERTISE_KEYS:
            raise Refused("not-found", f"there is nothing to fetch for {phase.value}")
        order = list(Phase)
        if order.index(exchange.phase) < order.index(phase):
            return None
        known = await self._of(live)
        session, index = self._session(known, exchange), known.context.index_of(client)
        match phase:
            case Phase.SHARE_KEYS:
                return session.roster().encode()
            case Phase.MASKED_INPUT:
                dealt = await self._dealt(live, known, exchange)
                dealers = set(session.neighbours(index)).intersection(dealt)
                return Inbox(tuple(dealt), {dealer: dealt[dealer].dealt[index] for dealer in dealers}).encode()
            case Phase.CONSISTENCY_CHECK:
                return encode_indices(_inputs(known, live))
            case Phase.UNMASKING:
                signed = {
                    known.context.index_of(one): base64.b64decode(exchange.said(one, Phase.CONSISTENCY_CHECK))
                    for one in exchange.who(Phase.CONSISTENCY_CHECK)
                }
                return encode_agreements(signed)

    # --- between replicas ---------------------------------------------------------------------------------------------

    async def hand_over(self, live: LiveRun) -> None:
        """Give what was revealed at this replica to the one that closes the round."""
        known = await self._of(live)
        if (relay := self._relay(known, live)) is not None:
            await relay.hand_over()

    async def collect(self, live: LiveRun) -> None:
        """Take in what was revealed at other replicas: this one closes the round."""
        known = await self._of(live)
        if (relay := self._relay(known, live)) is None:
            return
        for index, body in (await relay.collect()).items():
            try:
                await self._take(live, index, body)
            except SecAggError as error:  # it was checked where it was heard
                _log.warning("run %s, round %d, from another replica: %s", live.name, live.plan.number, error)

    def _relay(self, known: _Known, live: LiveRun) -> Relay | None:
        """None where there are no other replicas."""
        if known.relay is None and not self._services.replicas.is_alone:
            session = self._session(known, _exchange_in(live.state))
            known.relay = Relay(self._services.relay, self._services.audit_key, known.round_id, session)
        return known.relay

    # --- the sum ------------------------------------------------------------------------------------------------------

    async def opened(self, live: LiveRun) -> Opened | None:
        """What takes the masks off; None while too few have revealed. Raises `SecAggError` for a dealer that lied."""
        unmasker = await self._unmasker(live)
        return unmasker.open() if unmasker.is_enough else None

    def revealed(self, live: LiveRun) -> Revealed | None:
        """Whose shares have come here, and by whom a secret has too few though enough have answered.

        None at a replica that has not been at it: one that has just started has heard nobody, whoever has spoken.
        """
        known = self._known
        if known is None or known.round_id != live.round_id or known.session is None or known.unmasker is None:
            return None
        names, lacking = known.context.names, known.unmasker.lacking

        def listed(indices: Iterable[int]) -> str:
            return some([names[index] for index in indices])

        return Revealed(
            tuple(names[index] for index in sorted(known.unmasker.answered)),
            {names[i]: f"shares that it dealt did not open at {listed(at)}" for i, at in lacking.dealers.items()},
            {names[i]: f"it revealed no share of {listed(of)}" for i, of in lacking.withheld.items()},
        )

    async def _take(self, live: LiveRun, index: int, body: bytes) -> bool:
        """Whether they had not come before. Raises `SecAggError` for shares that are not those that were dealt."""
        unmasker, context = await self._unmasker(live), (await self._of(live)).context
        is_new = index not in unmasker.answered
        unmasker.take(Unmasking.decode(body, index, len(context.cohort)))
        return is_new

    async def _unmasker(self, live: LiveRun) -> Unmasker:
        known, exchange = await self._of(live), _exchange_in(live.state)
        if known.unmasker is None:
            session, dealt = self._session(known, exchange), await self._dealt(live, known, exchange)
            of = Sum(_shared(known, exchange), _inputs(known, live))
            known.unmasker = known.unmasker or Unmasker(session, of, dealt)
        return known.unmasker

    # --- what is known of it ------------------------------------------------------------------------------------------

    async def _of(self, live: LiveRun) -> _Known:
        """Raises `Refused` where there is no secure round under way."""
        _exchange_in(live.state)
        known = self._known
        if known is None or known.round_id != live.round_id:
            state = _open(live.state)
            assignment = await self._assignments.of(live, min(state.cohort), state)
            known = self._known  # another request may have made it meanwhile, and there must be only one
            if known is None or known.round_id != live.round_id:
                self._known = known = _Known(live.round_id, context_of(assignment))
        return known

    def _session(self, known: _Known, exchange: Exchange) -> Session:
        """Raises `Refused` while the roster is open."""
        if exchange.phase is Phase.ADVERTISE_KEYS:
            raise Refused("assignment-closed", "the roster of this round is not closed yet; fetch it first")
        if known.session is None:
            adverts = (
                AdvertiseKeys.decode(base64.b64decode(exchange.said(client, Phase.ADVERTISE_KEYS)))
                for client in exchange.who(Phase.ADVERTISE_KEYS)
            )
            by_index = {advert.index: advert for advert in adverts}
            known.session = Session(known.context, bytes.fromhex(exchange.opening), by_index)
        return known.session

    async def _dealt(self, live: LiveRun, known: _Known, exchange: Exchange) -> Mapping[int, ShareKeys]:
        """The ShareKeys messages of U2, by index."""
        if known.dealt is None:
            session, dealt = self._session(known, exchange), dict[int, ShareKeys]()
            bodies = await self._services.rounds.sealed_shares(live.round_id)
            if not bodies.keys() >= set(exchange.masked):
                raise Refused("assignment-closed", "the round is over")  # another replica has ended it
            for client in exchange.masked:
                index, body = known.context.index_of(client), bodies[client]
                dealt[index] = ShareKeys.decode(body, index, session.neighbours(index))
            known.dealt = dict(sorted(dealt.items()))
        return known.dealt


def _open(state: RoundState) -> Training | Closing:
    state = state.closing if isinstance(state, Committed) else state
    if not isinstance(state, Training | Closing):
        raise Refused("assignment-closed", "the round is over; check in for the next one")
    return state


def _exchange_in(state: RoundState) -> Exchange:
    if (exchange := _open(state).exchange) is None:
        raise Refused("assignment-closed", "this round is not a secure one")
    return exchange


def _shared(known: _Known, exchange: Exchange) -> tuple[int, ...]:
    """U2."""
    return tuple(known.context.index_of(client) for client in exchange.masked)


def _inputs(known: _Known, live: LiveRun) -> tuple[int, ...]:
    """U3."""
    state = _open(live.state)
    if not isinstance(state, Closing):
        raise Refused("assignment-closed", "it is not said yet who is in the sum")
    return tuple(sorted(known.context.index_of(client) for client in state.accepted))


def _require_own(is_own: bool) -> None:
    if not is_own:
        raise Refused("malformed-request", "the message names another client of the cohort as its sender")
