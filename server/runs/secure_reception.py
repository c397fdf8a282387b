"""What devices ask of a secure round: to take a message, to give them theirs when its time has come."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from umbel.aggregation.round.states import Closing, RoundState, Spoke, Training
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.server.devices.waiting import HeldRequest
from umbel.server.problems import Refused
from umbel.server.runs.inputs import MessageInput, PastAttempt

if TYPE_CHECKING:
    from umbel.server.runs.reception import AssignmentPlace, Reception

Waits: TypeAlias = tuple[float, HeldRequest]
Found = TypeVar("Found")


class SecureReception:
    """Answers devices from the state of secure rounds; holds their requests open while there is nothing to say."""

    def __init__(self, reception: "Reception") -> None:
        self._reception = reception

    async def hear(self, client: ClientId, assignment: AssignmentId, phase: Phase, body: bytes, waits: Waits) -> bool:
        """Take a client's message; whether nothing more is to be done about it. Raises `Refused`."""
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

    async def tell(self, client: ClientId, assignment: AssignmentId, phase: Phase, waits: Waits) -> bytes | None:
        """What a client needs for its turn; None if that has not come in time. Raises `Refused`."""
        place = await self._reception.place(client, assignment)

        async def told() -> bytes | None:
            _require_part(place)
            return await place.driver.secure.tell(place.driver.live, client, phase)

        if (found := await self._held(place, waits, told)) is not None:
            place.driver.note_message(assignment, down=len(found))
        return found

    async def keep_up(self, place: "AssignmentPlace", phase: Phase) -> None:
        """A client may have heard of its turn at another replica, of which this one has not seen yet."""
        driver = place.driver
        if not driver.services.replicas.is_alone and _turn(driver.state) is not phase:
            await driver.catch_up()

    async def _reveal(self, place: "AssignmentPlace", body: bytes, waits: Waits) -> bool:
        """Take the shares that a client reveals, and hold its request until they are not needed any more."""
        driver = place.driver
        if _is_over(place):
            return True
        try:
            is_new = await driver.secure.reveal(driver.live, place.client, body)
        except Refused:
            await driver.catch_up()
            if _is_over(place):  # another replica has unmasked the sum a moment ago
                return True
            raise
        if is_new:  # noted at once: in the next moment the sum may be unmasked, and the record made
            driver.note_message(place.assignment, up=len(body))
        driver.wake()

        async def is_over() -> bool | None:
            return _is_over(place) or None

        return await self._held(place, waits, is_over) or False

    async def _held(
        self, place: "AssignmentPlace", waits: Waits, ask: Callable[[], Awaitable[Found | None]]
    ) -> Found | None:
        """What `ask` finds, as soon as it finds something; None when the time is up or nobody listens any more."""
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


def _turn(state: RoundState) -> Phase | None:
    exchange = state.exchange if isinstance(state, Training | Closing) else None
    return exchange.phase if exchange else None


def _require_part(place: "AssignmentPlace") -> None:
    """Raise `Refused` unless the round goes on, and with this client."""
    state = place.driver.state
    if not place.is_current or not isinstance(state, Training | Closing):
        raise _closed()
    is_left_out = place.client in (state.declined if isinstance(state, Training) else state.missing)
    if is_left_out:
        raise _closed()


def _closed() -> Refused:
    return Refused("assignment-closed", "the round is over, or goes on without this client; check in for the next one")
