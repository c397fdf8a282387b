"""A run's open secure round at this replica.

`SecureCoordinator` (aggregation/secagg/coordinator.py) is the protocol. This file gives it what is stored: the round's
state (`Exchange`), and the sealed shares, which have their own table. Revealed shares are only in memory. After a
restart the coordinator asks the clients again, and they repeat their answers.
"""

import base64
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from umbel.aggregation.phrases import some
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.reports import MaskedInput
from umbel.aggregation.round.states import Closing, Committed, Revealed, RoundState, Training
from umbel.aggregation.secagg.context import context_of
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.errors import ChangedMessage, OutOfTurn, SecAggError
from umbel.aggregation.secagg.messages import AdvertiseKeys
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.secagg.unmasking import Opened
from umbel.aggregation.types import ClientId
from umbel.server.problems import Refused
from umbel.server.services import Services
from umbel.server.store.stored import LiveRun
from umbel.server.sums.relay import Relay

_log = logging.getLogger(__name__)

AssignmentOf: TypeAlias = Callable[[LiveRun, ClientId, Training | Closing], Awaitable[Assignment]]
"""Returns the assignment of a client of the cohort."""


@dataclass(slots=True)
class _Attempt:
    """One attempt at this replica. `relay`: None if there are no other replicas."""

    round_id: int
    party: SecureCoordinator
    relay: Relay | None = None


class SecureRounds:
    """The secure round of a run's newest attempt. Pass the run in its current state to each method."""

    def __init__(self, services: Services, assignment_of: AssignmentOf) -> None:
        self._services = services
        self._assignment_of = assignment_of
        self._attempt: _Attempt | None = None

    def forget(self) -> None:
        """Drop the revealed shares, because the attempt is over."""
        self._attempt = None

    # --- messages from clients ----------------------------------------------------------------------------------------

    async def check(self, live: LiveRun, client: ClientId, phase: Phase, body: bytes) -> str:
        """Check a client's message and return what the round's state keeps of it. Raises `Refused`."""
        party = (await self._of(live)).party
        index = party.context.index_of(client)
        try:
            match phase:
                case Phase.ADVERTISE_KEYS:
                    party.check_keys(index, body)
                    return base64.b64encode(body).decode()
                case Phase.SHARE_KEYS:
                    party.check_shares(index, body)
                    return hashlib.sha256(body).hexdigest()
                case Phase.CONSISTENCY_CHECK:
                    _require_closed(live.state)
                    party.check_agreement(index, body)
                    return base64.b64encode(body).decode()
                case _:
                    raise Refused("malformed-request", f"clients send no message in the phase {phase.value}")
        except OutOfTurn as error:
            raise Refused("assignment-closed", str(error)) from error
        except (SecAggError, ValueError) as error:
            raise Refused("malformed-request", f"the message of the phase {phase.value} is refused: {error}") from error

    async def check_input(self, live: LiveRun, client: ClientId, work: MaskedInput) -> None:
        """Raise `Refused` unless the client has signed the masked update that it reports.

        Of a client whose update cannot count, nothing is checked; the round's machine answers its report.
        """
        party = (await self._of(live)).party
        if client not in _exchange_in(live.state).masked:
            return
        signature = base64.b64decode(work.signature)
        try:
            party.check_input(party.context.index_of(client), bytes.fromhex(work.update_sha256), signature)
        except SecAggError as error:
            raise Refused("report-refused", str(error)) from error

    async def reveal(self, live: LiveRun, client: ClientId, body: bytes) -> bool:
        """Take the shares that a client reveals. Returns False if they came before.

        Raises `Refused` before the phase of unmasking: a client reveals shares only after it has seen that enough
        others signed the same sum. Raises `Refused` for bad shares, and names the client at fault if it is known.
        """
        if _exchange_in(live.state).phase is not Phase.UNMASKING:
            raise Refused(
                "assignment-closed", "the coordinator has not asked for shares yet; ask for the assignment's status"
            )
        attempt = await self._of(live)
        index = attempt.party.context.index_of(client)
        try:
            is_new = (await self._with_shares(live)).take_shares(index, body)
        except ChangedMessage as error:
            raise Refused("changed-message", str(error)) from error
        except SecAggError as error:
            _log.warning("run %s, round %d: %s", live.name, live.plan.number, error)
            raise Refused("malformed-request", f"these shares are refused: {error}") from error
        if (relay := self._relay(attempt)) is not None:
            relay.keep(index, body)
        return is_new

    # --- messages to clients ------------------------------------------------------------------------------------------

    async def message_for(self, live: LiveRun, client: ClientId, phase: Phase) -> bytes | None:
        """What a client needs for its turn in a phase; None before that phase."""
        exchange = _exchange_in(live.state)
        if phase is Phase.ADVERTISE_KEYS:
            raise Refused("not-found", f"the phase {phase.value} has nothing to fetch")
        order = list(Phase)
        if order.index(exchange.phase) < order.index(phase):
            return None
        party = (await self._of(live)).party
        match phase:
            case Phase.SHARE_KEYS:
                return party.roster()
            case Phase.MASKED_INPUT:
                return (await self._with_shares(live)).inbox(party.context.index_of(client))
            case Phase.CONSISTENCY_CHECK:
                _require_closed(live.state)
                return party.inputs()
            case Phase.UNMASKING:
                who = exchange.who(Phase.CONSISTENCY_CHECK)
                return party.agreements(
                    {party.context.index_of(one): _word(exchange, one, Phase.CONSISTENCY_CHECK) for one in who}
                )

    # --- between replicas ---------------------------------------------------------------------------------------------

    async def hand_over(self, live: LiveRun) -> None:
        """Give the shares that this replica has received to the replica that closes the round."""
        if (relay := self._relay(await self._of(live))) is not None:
            await relay.hand_over()

    async def collect(self, live: LiveRun) -> None:
        """Take the shares that other replicas have received. Only the replica that closes the round calls this."""
        if (relay := self._relay(await self._of(live))) is None:
            return
        for index, body in (await relay.collect()).items():
            try:
                (await self._with_shares(live)).take_shares(index, body)
            except SecAggError as error:  # the other replica had checked it
                _log.warning(
                    "run %s, round %d: bad shares from another replica: %s", live.name, live.plan.number, error
                )

    def _relay(self, attempt: _Attempt) -> Relay | None:
        if attempt.relay is None and not self._services.replicas.is_alone:
            session = _session_of(attempt.party)
            attempt.relay = Relay(self._services.relay, self._services.audit_key, attempt.round_id, session)
        return attempt.relay

    # --- the sum ------------------------------------------------------------------------------------------------------

    async def opened(self, live: LiveRun) -> Opened | None:
        """What removes the masks; None while too few clients have revealed. Raises `SecAggError` for false shares."""
        party = await self._with_shares(live)
        return party.open() if party.is_enough else None

    def revealed(self, live: LiveRun) -> Revealed | None:
        """The clients whose shares came here, and the clients to blame if enough answered but a secret lacks shares.

        None at a replica that has received no shares, as after a restart.
        """
        attempt = self._attempt
        if attempt is None or attempt.round_id != live.round_id or not attempt.party.is_ready_for_shares:
            return None
        names, lacking = attempt.party.context.names, attempt.party.lacking

        def listed(indices: Iterable[int]) -> str:
            return some([names[index] for index in indices])

        return Revealed(
            tuple(names[index] for index in sorted(attempt.party.answered)),
            {names[i]: f"shares that it dealt did not open at {listed(at)}" for i, at in lacking.dealers.items()},
            {names[i]: f"it revealed no share of {listed(of)}" for i, of in lacking.withheld.items()},
        )

    # --- the attempt --------------------------------------------------------------------------------------------------

    async def _of(self, live: LiveRun) -> _Attempt:
        """This replica's attempt, up to date with the round's state. Raises `Refused` if there is no secure round."""
        exchange, attempt = _exchange_in(live.state), self._attempt
        if attempt is None or attempt.round_id != live.round_id:
            state = _open(live.state)
            assignment = await self._assignment_of(live, min(state.cohort), state)
            attempt = self._attempt  # another request may have made it; there must be only one
            if attempt is None or attempt.round_id != live.round_id:
                party = SecureCoordinator(context_of(assignment), bytes.fromhex(exchange.opening))
                self._attempt = attempt = _Attempt(live.round_id, party)
        _bring_up_to_date(attempt.party, live.state, exchange)
        return attempt

    async def _with_shares(self, live: LiveRun) -> SecureCoordinator:
        """The party, with the sealed shares loaded of the clients that may send masked input (U2)."""
        party, exchange = (await self._of(live)).party, _exchange_in(live.state)
        _session_of(party)
        if not party.has_shares:
            bodies = await self._services.rounds.sealed_shares(live.round_id)
            if not bodies.keys() >= set(exchange.masked):
                raise Refused("assignment-closed", "the round is over")  # another replica has ended it
            indices = {party.context.index_of(client): client for client in exchange.masked}
            party.load_shares({index: party.read_shares(index, bodies[one]) for index, one in indices.items()})
        return party


def _bring_up_to_date(party: SecureCoordinator, state: RoundState, exchange: Exchange) -> None:
    """Close each phase of the party that the round's state has passed."""
    if exchange.phase is Phase.ADVERTISE_KEYS:
        return
    if not party.has_roster:
        words = (_word(exchange, client, Phase.ADVERTISE_KEYS) for client in exchange.who(Phase.ADVERTISE_KEYS))
        party.close_roster(AdvertiseKeys.decode(word) for word in words)
    if party.shared is None and not exchange.phase.is_before_inputs:
        party.close_shares(map(party.context.index_of, exchange.masked))
    if party.summed is None and isinstance(closing := _open(state), Closing):
        party.close_inputs(map(party.context.index_of, closing.accepted))


def _word(exchange: Exchange, client: ClientId, phase: Phase) -> bytes:
    return base64.b64decode(exchange.said(client, phase))


def _session_of(party: SecureCoordinator) -> Session:
    """Raises `Refused` while the roster is open."""
    try:
        return party.session
    except OutOfTurn as error:
        raise Refused("assignment-closed", str(error)) from error


def _open(state: RoundState) -> Training | Closing:
    state = state.closing if isinstance(state, Committed) else state
    if not isinstance(state, Training | Closing):
        raise Refused("assignment-closed", "the round is over; check in for the next one")
    return state


def _exchange_in(state: RoundState) -> Exchange:
    if (exchange := _open(state).exchange) is None:
        raise Refused("assignment-closed", "this is not a secure round, so it takes no messages of secure aggregation")
    return exchange


def _require_closed(state: RoundState) -> None:
    if not isinstance(_open(state), Closing):
        raise Refused(
            "assignment-closed", "the coordinator has not decided yet which clients are in the sum; ask again later"
        )
