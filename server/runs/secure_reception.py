"""Answers the requests of devices in a secure round: it takes their messages and gives them theirs."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from umbel.aggregation.round.states import Closing, Spoke, Training
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.server.devices.waiting import HeldRequest
from umbel.server.problems import Refused
from umbel.server.runs.inputs import MessageInput, PastAttempt
from umbel.server.runs.reports import exchange_of

if TYPE_CHECKING:
    from umbel.server.runs.reception import AssignmentPlace, Reception

Waits: TypeAlias = tuple[float, HeldRequest]
Found = TypeVar("Found")


class SecureReception:
    """Answers devices from the state of secure rounds, and holds their requests open until there is an answer."""

    def __init__(self, reception: "Reception") -> None:
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

        if (found := await self._held(place, waits, message)) is not None:
            place.driver.note_message(assignment, down=len(found))
        return found

    async def keep_up(self, place: "AssignmentPlace", phase: Phase) -> None:
        """Load the run if this replica may have missed the phase, of which a client can learn at another replica."""
        driver = place.driver
        exchange = exchange_of(driver.state)
        if not driver.services.replicas.is_alone and (exchange is None or exchange.phase is not phase):
            await driver.catch_up()

    async def _reveal(self, place: "AssignmentPlace", body: bytes, waits: Waits) -> bool:
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
        self, place: "AssignmentPlace", waits: Waits, ask: Callable[[], Awaitable[Found | None]]
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


def _is_over(place: "AssignmentPlace") -> bool:
    return not (place.is_current and isinstance(place.driver.state, Training | Closing))


def _require_part(place: "AssignmentPlace") -> None:
    """Raise `Refused` unless the round is open, and with this client."""
    state = place.driver.state
    if not (place.is_current and isinstance(state, Training | Closing)):
        raise _closed()
    if place.client in (state.declined if isinstance(state, Training) else state.missing):
        raise _closed()


def _closed() -> Refused:
    return Refused(
        "assignment-closed", "the round is over, or continues without this client; check in for the next one"
    )
