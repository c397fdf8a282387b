"""Answers the requests of devices: check-ins, the status of an assignment, reports, and messages of secure rounds.

Requests come here parsed and verified.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, TypeVar

from umbel.aggregation.audit.bundle import SignedReport
from umbel.aggregation.messages import (
    AssignmentCounts,
    AssignmentState,
    AssignmentStatus,
    CheckedIn,
    CheckIn,
    NotComing,
    ReportAnswer,
    RunStatus,
)
from umbel.aggregation.plans.assignment import run_of
from umbel.aggregation.reports import MaskedInput, Work
from umbel.aggregation.round.machine import advance, refuses
from umbel.aggregation.round.states import (
    Abandoned,
    Answer,
    Closing,
    Committed,
    Declined,
    Recruiting,
    Reported,
    Spoke,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.records import AwayKind, TurnedAway
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.devices.fitness import RunModel, Unfit, stranger, unfit
from umbel.server.devices.waiting import HeldRequest
from umbel.server.problems import Refused
from umbel.server.runs.coordinator import Coordinator
from umbel.server.runs.decision import DeclineInput, MessageInput, PastAttempt, ReportInput, exchange_of
from umbel.server.runs.driver import RunDriver
from umbel.server.store.stored import StoredAssignment
from umbel.server.store.waiters import Waiting

RETRY_AFTER_S = 1.0
_CAME_BACK = "it has left the round and come back, so it no longer has the round's keys"
_GRACE_S = 2.0  # a client that comes back this much later than it was asked to still counts as waiting
Waits: TypeAlias = tuple[float, HeldRequest]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Visit:
    """A check-in."""

    client: ClientId
    message: CheckIn
    admit: Callable[[Waiting | None], Awaitable[None]]  # stores the nonce, and who waits; refuses a replay
    line: Callable[[], AbstractContextManager[HeldRequest]]  # holds the request open


@dataclass(frozen=True, slots=True)
class _Reply:
    """How to reply to a check-in if it is no replay."""

    answer: Callable[[], Awaitable[CheckedIn]]
    entry: Waiting | None = None  # what to store of a client that waits


@dataclass(frozen=True, slots=True)
class AssignmentPlace:
    """An assignment with its run and client."""

    driver: RunDriver
    client: ClientId
    assignment: AssignmentId
    past: StoredAssignment | None = None  # None if it was of the newest attempt when it was looked up

    @property
    def is_current(self) -> bool:
        """Whether it still belongs to the newest attempt."""
        return self.past is None and self.driver.knows(self.client, self.assignment)

    @property
    def training(self) -> Training | None:
        """The open round, if it still waits for this assignment."""
        is_current = self.driver.assignment_id(self.client) == self.assignment
        return self.driver.open_round(self.client) if is_current else None

    def require_open(self) -> Training:
        """Raise `Refused` unless the round still waits for an update of this assignment."""
        if (training := self.training) is None:
            raise Refused("assignment-closed", "the round no longer waits for this update; check in for the next one")
        if not training.plan.has_uploads:
            raise Refused(
                "report-refused", "this assignment asks to measure the model: send an evaluation, not an update"
            )
        return training


class Reception:
    """Answers devices from the state of the runs, and holds their requests open until there is an answer."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.secure = SecureReception(self)
        self._coordinator = coordinator
        self._services = coordinator.services

    async def check_in(self, visit: Visit) -> CheckedIn:
        """Wait for work. A client with an open assignment gets it again, at once."""
        await self._coordinator.count_outage()
        driver = await self._coordinator.driver(visit.message.run)
        reply = await self._reply(driver, visit)
        await visit.admit(reply.entry)  # before anything changes, and before work that a replay must not cause
        driver.heard.note(visit.client)
        await self._note_return(driver, visit.client)
        return await reply.answer()

    async def _note_return(self, driver: RunDriver, client: ClientId) -> None:
        """A client that checks in has left its last round, and its keys are gone: a sum that waits for its signature
        need not wait any longer.
        """
        event = Declined(self._services.clock.now(), client, _CAME_BACK)
        if refuses(driver.state, event):
            with suppress(PastAttempt):
                await driver.submit(DeclineInput(event, driver.assignment_id(client)))
            driver.wake()

    async def _reply(self, driver: RunDriver, visit: Visit) -> _Reply:
        """Decide how to reply to a check-in, and change nothing."""
        client, message = visit.client, visit.message
        if message.layout_digest != driver.layout.model.digest:  # control variates are not the client's own
            # Not here: reading a layout takes milliseconds, which a replay must not cost.
            return _Reply(lambda: self._refuse_layout(driver, visit))
        if (found := await self._unfit(driver, visit)) is not None:
            return _Reply(lambda: self._turn_away(driver, client, found))
        if message.sample_count == 0 and driver.plan.needs_counts:
            return _Reply(_refuse_uncounted)
        if driver.open_round(client) is not None or driver.is_over:
            return _Reply(lambda: self._checked_in(driver, client, RETRY_AFTER_S))
        known = await self._services.registry.client(client)
        candidate = Candidate(client, message.sample_count, known.tier if known else "")
        away_s = driver.pacing.send_away_s(driver.state, driver.plan, client, message.wait_s)
        if away_s is not None:
            return _Reply(lambda: self._checked_in(driver, client, away_s), driver.waiting.entry(candidate, 0.0))
        ends_at = self._services.clock.now() + message.wait_s
        entry = driver.waiting.entry(candidate, message.wait_s + RETRY_AFTER_S + _GRACE_S)
        return _Reply(lambda: self._wait_for_work(driver, visit, entry, ends_at), entry)

    async def _unfit(self, driver: RunDriver, visit: Visit) -> Unfit | None:
        services, file, members = self._services, driver.run.file, await driver.members.list()
        model, sites = RunModel(driver.layout.model, file.tensor_rules), file.coverage.sites
        return await unfit(services.registry, services.models, model, sites, members, visit.client, visit.message)

    async def _refuse_layout(self, driver: RunDriver, visit: Visit) -> NoReturn:
        found = await self._unfit(driver, visit)
        assert found is not None, "a client with another layout is unfit"
        await self._turn_away(driver, visit.client, found)

    async def _turn_away(self, driver: RunDriver, client: ClientId, found: Unfit) -> NoReturn:
        """Note the refusal for the operator, unless it belongs to the handshake, and refuse."""
        now, reason = self._services.clock.now(), str(found.refusal)
        if found.refusal.is_handshake:
            raise found.refusal
        if await self._services.turned_away.note(driver.name, TurnedAway(client, reason, now), found.in_place_of):
            driver.now.changed()
        raise found.refusal

    async def not_coming(self, client: ClientId, run: RunId, word: NotComing) -> None:
        """Note for the operator why a client does not come to a run that is open to it. Raises `Refused` otherwise.

        That it may come is no news of a client that has come meanwhile.
        """
        driver = await self._coordinator.driver(run)
        if (found := await stranger(self._services.registry, await driver.members.list(), client)) is not None:
            raise found.refusal
        kind = AwayKind.NOT_READY if word.may_come else AwayKind.STAYS_AWAY
        away = TurnedAway(client, word.reason, self._services.clock.now(), kind)
        has_come = driver.open_round(client) is not None or driver.waiting.is_here(client)
        if driver.is_over or (word.may_come and has_come):
            return
        if await self._services.turned_away.note(run, away):
            driver.wake()  # a round that waits for this client may begin without it

    async def status(
        self, client: ClientId, assignment: AssignmentId, wait_s: float, line: HeldRequest
    ) -> AssignmentStatus:
        """Whether the round still waits for this client's report. The request is held open while it does."""
        place = await self.place(client, assignment)
        place.driver.signs.asked(client, place.driver.live.round_id if place.training else None)
        if place.training and wait_s > 0:
            with place.driver.signs.watching(place.driver.live.round_id, client, line):
                await self._wait_for_close(place, wait_s, line)
        if (training := place.training) is not None:
            left_s = max(0.0, training.closes_at - self._services.clock.now())
            return AssignmentStatus(AssignmentState.OPEN, "the round waits for this report", left_s)
        return AssignmentStatus(AssignmentState.CLOSED, await self._why_closed(client, assignment), 0.0)

    async def counts(self, client: ClientId, assignment: AssignmentId) -> AssignmentCounts:
        """Whether the newest model has the work of this client's assignment in it."""
        await self.place(client, assignment)
        return AssignmentCounts(await self._services.rounds.counts(assignment))

    async def report(
        self, client: ClientId, assignment: AssignmentId, work: Work, signed: SignedReport
    ) -> ReportAnswer:
        """Take a report. The answer comes when the report is durable. A repeated report gets the same answer."""
        place = await self.place(client, assignment)
        event = Reported(self._services.clock.now(), client, work)
        if isinstance(work, MaskedInput):
            await self.secure.keep_up(place, Phase.MASKED_INPUT)
        if isinstance(work, MaskedInput) and (training := place.training) and training.secure:
            await place.driver.secure.check_input(place.driver.live, client, work)
        try:
            answer = await place.driver.submit(ReportInput(event, assignment, signed))
        except PastAttempt:
            return await self._answer_past(client, assignment, event)
        assert answer is not None, "the machine answers every report"
        return answer

    def refuse_if_closing(self) -> None:
        """Raise `Refused` while this coordinator is shutting down."""
        self._coordinator.refuse_if_closing()

    async def decline(self, client: ClientId, assignment: AssignmentId, reason: str) -> None:
        """Note that a client will not report, or will not sign the participant list, unless it comes too late."""
        place = await self.place(client, assignment)
        event = Declined(self._services.clock.now(), client, reason)
        if place.training is None:
            await self.secure.keep_up(place, Phase.CONSISTENCY_CHECK)
        if place.training or (place.is_current and refuses(place.driver.state, event)):
            with suppress(PastAttempt):
                await place.driver.submit(DeclineInput(event, assignment))
        place.driver.wake()

    async def place(self, client: ClientId, assignment: AssignmentId) -> AssignmentPlace:
        """Look up an assignment that a client asks about. Raises `Refused` unless it is this client's."""
        place = await self._place(client, assignment)
        place.driver.heard.note(client)
        return place

    async def _place(self, client: ClientId, assignment: AssignmentId) -> AssignmentPlace:
        self._services.registry.refuse_revoked(client)
        await self._coordinator.count_outage()
        driver = self._coordinator.drivers.get(run_of(assignment))
        if driver and driver.knows(client, assignment):
            return AssignmentPlace(driver, client, assignment)
        found = await self._services.rounds.assignment(assignment)
        if found is None or found.client != client:
            raise Refused("unknown-assignment", "this client has no assignment with this id; check in for a new one")
        driver = await self._coordinator.driver(run_of(assignment))
        if found.round_id >= driver.live.round_id:
            await driver.catch_up()  # another replica has begun this attempt
        if driver.knows(client, assignment):
            return AssignmentPlace(driver, client, assignment)
        return AssignmentPlace(driver, client, assignment, found)

    async def _wait_for_work(self, driver: RunDriver, visit: Visit, entry: Waiting, ends_at: float) -> CheckedIn:
        """Hold the check-in open until there is work or its time is up."""
        client, waiter = visit.client, driver.waiting.enter(entry)
        driver.wake()
        with visit.line() as line:
            try:
                await self._hold(driver, client, line, ends_at)
            finally:
                away_s = driver.pacing.come_back_s(driver.state, driver.plan, client, RETRY_AFTER_S)
                is_back_soon = not line.is_gone and driver.open_round(client) is None and away_s <= RETRY_AFTER_S
                driver.waiting.leave(waiter, still_waits=is_back_soon)
                self._note_seen(driver, client, line)
        return await self._checked_in(driver, client, away_s)

    async def _hold(self, driver: RunDriver, client: ClientId, line: HeldRequest, ends_at: float) -> None:
        """Hold a check-in until it has work, the run is over, its time is up, or the client has hung up."""
        clock = self._services.clock
        while (left_s := ends_at - clock.now()) > 0 and not line.is_gone:
            if driver.open_round(client) or driver.is_over:
                return
            self._coordinator.refuse_if_closing()
            with driver.bells.listen(client) as bell:
                await line.hold(clock, bell, left_s)
            self._services.registry.refuse_revoked(client)
            if (found := await stranger(self._services.registry, await driver.members.list(), client)) is not None:
                await self._turn_away(driver, client, found)

    async def _wait_for_close(self, place: AssignmentPlace, wait_s: float, line: HeldRequest) -> None:
        clock, ends_at = self._services.clock, self._services.clock.now() + wait_s
        while place.training and (left_s := ends_at - clock.now()) > 0 and not line.is_gone:
            self._coordinator.refuse_if_closing()
            with place.driver.bells.listen(place.client) as bell:
                await line.hold(clock, bell, left_s)
        self._note_seen(place.driver, place.client, line)

    def _note_seen(self, driver: RunDriver, client: ClientId, line: HeldRequest) -> None:
        if not line.is_gone:
            self._services.heard.note(client)
            driver.heard.note(client)

    async def _checked_in(self, driver: RunDriver, client: ClientId, retry_after_s: float) -> CheckedIn:
        training = driver.open_round(client)
        if training is not None:
            assignment = await driver.assignments.of(driver.live, client, training)
            return CheckedIn(RunStatus.RUNNING, "work", 0.0, assignment)
        if driver.is_over:
            return CheckedIn(driver.run.status, driver.run.reason, 0.0)
        if driver.is_paused:
            return CheckedIn(RunStatus.PAUSED, f"the run is paused: {driver.run.reason}", retry_after_s)
        why = driver.state.why if isinstance(driver.state, Recruiting) else "a round without this client is under way"
        return CheckedIn(RunStatus.RUNNING, why, retry_after_s)

    async def _answer_past(self, client: ClientId, assignment: AssignmentId, event: Reported) -> ReportAnswer:
        """Answer a report whose attempt has ended: with the stored answer, or else with the machine's."""
        past = await self._services.rounds.assignment(assignment)
        assert past is not None, "assignments are never deleted"
        if past.answer is not None:
            return past.answer
        _, commands = advance(await self._services.rounds.round_state(past.round_id), event)
        answer = next(command for command in commands if isinstance(command, Answer))
        return ReportAnswer(answer.outcome, answer.reason)

    async def _why_closed(self, client: ClientId, assignment: AssignmentId) -> str:
        place = await self.place(client, assignment)
        state = await self._services.rounds.round_state(place.past.round_id) if place.past else place.driver.state
        match state:
            case Training() if client in state.declined:
                return f"the round continues without this client: {state.declined[client]}"
            case Recruiting() | Training():
                return "this client has reported or declined, or the window is over"
            case Closing() | Abandoned():
                return state.reason
            case Committed():
                return state.closing.reason


async def _refuse_uncounted() -> NoReturn:
    raise Refused(
        "sample-count-needed",
        "this run draws or weights clients by sample counts, and the check-in has none; send sample_count",
        is_handshake=True,
    )


class SecureReception:
    """Answers devices from the state of secure rounds, and holds their requests open until there is an answer."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    async def take_message(
        self, client: ClientId, assignment: AssignmentId, phase: Phase, body: bytes, waits: Waits
    ) -> bool:
        """Take a client's message. Returns False if the client must send it again. Raises `Refused`."""
        place = await self._reception.place(client, assignment)
        await self.keep_up(place, phase)
        if phase is Phase.UNMASKING:
            return await self._reveal(place, body, waits)
        _require_part(place)
        driver = place.driver
        word = await driver.secure.check(driver.live, client, phase, body)
        event = Spoke(driver.services.clock.now(), client, phase, word)
        try:
            await driver.submit(MessageInput(event, assignment, body))
        except PastAttempt as error:
            raise _closed() from error
        driver.wake()
        return True

    async def message_for(self, client: ClientId, assignment: AssignmentId, phase: Phase, waits: Waits) -> bytes | None:
        """What a client needs for its turn; None if the turn has not come in time. Raises `Refused`."""
        place = await self._reception.place(client, assignment)

        async def message() -> bytes | None:
            _require_part(place)
            return await place.driver.secure.message_for(place.driver.live, client, phase)

        driver = place.driver
        is_watch = phase in (Phase.SHARE_KEYS, Phase.MASKED_INPUT) and waits[0] > 0 and place.training is not None
        with driver.signs.watching(driver.live.round_id, client, waits[1]) if is_watch else nullcontext():
            found = await self._held(place, waits, message)
        if found is not None:
            place.driver.note_message(assignment, down=len(found))
        return found

    async def keep_up(self, place: AssignmentPlace, phase: Phase) -> None:
        """Load the run if this replica may have missed the phase, of which a client can learn at another replica."""
        driver = place.driver
        exchange = exchange_of(driver.state)
        if not driver.services.replicas.is_alone and (exchange is None or exchange.phase is not phase):
            await driver.catch_up()

    async def _reveal(self, place: AssignmentPlace, body: bytes, waits: Waits) -> bool:
        """Take the shares that a client reveals, and hold its request open. Returns whether the round is over."""
        driver = place.driver
        if _is_over(place):
            return True
        try:
            is_new = await driver.secure.reveal(driver.live, place.client, body)
        except Refused:
            await driver.catch_up()
            if _is_over(place):  # another replica has just unmasked the sum
                return True
            raise
        if is_new:  # counted at once, because the sum may be unmasked and recorded next
            driver.note_message(place.assignment, up=len(body))
        driver.wake()

        async def is_over() -> bool | None:
            return _is_over(place) or None

        return await self._held(place, waits, is_over) or False

    async def _held(
        self, place: AssignmentPlace, waits: Waits, ask: Callable[[], Awaitable[Found | None]]
    ) -> Found | None:
        """Call `ask` at each change and return what it finds; None when the time is up or the client has hung up."""
        wait_s, line = waits
        clock = place.driver.services.clock
        ends_at = clock.now() + wait_s
        while True:
            with place.driver.bells.listen(place.client) as bell:
                if (found := await ask()) is not None:
                    return found
                left_s = ends_at - clock.now()
                if left_s <= 0 or line.is_gone:
                    return None
                self._reception.refuse_if_closing()
                await line.hold(clock, bell, left_s)


def _is_over(place: AssignmentPlace) -> bool:
    return not (place.is_current and isinstance(place.driver.state, Training | Closing))


def _require_part(place: AssignmentPlace) -> None:
    """Raise `Refused` unless the round is open, and with this client."""
    state = place.driver.state
    if not (place.is_current and isinstance(state, Training | Closing)):
        raise _closed()
    if place.client in (state.declined if isinstance(state, Training) else state.missing):
        raise _closed()


def _closed() -> Refused:
    return Refused(
        "assignment-closed", "the round is over, or it continues without this client; check in for the next one"
    )
