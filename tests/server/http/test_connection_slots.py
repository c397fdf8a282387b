"""Which connection is closed when all slots are taken."""

from dataclasses import dataclass

from umbel.server.http.limits import SCOPE_KEY, ConnectionSlots, Priority, mark_verified


@dataclass(eq=False)
class FakeConnection:
    is_gone: bool = False
    is_verified: bool = False

    def abort(self) -> None:
        self.is_gone = True

    def mark_verified(self) -> None:
        self.is_verified = True


def entered(slots: ConnectionSlots, count: int) -> list[FakeConnection]:
    connections = [FakeConnection() for _ in range(count)]
    for connection in connections:
        assert slots.add(connection)
    return connections


def test_unverified_ones_are_closed_first_the_oldest_before_the_others() -> None:
    slots = ConnectionSlots(3)
    first, second, third = entered(slots, 3)
    slots.set_priority(first, Priority.IDLE)
    entered(slots, 1)
    assert [connection.is_gone for connection in (first, second, third)] == [False, True, False]


def test_then_those_between_requests_then_verified_ones_that_must_send() -> None:
    slots = ConnectionSlots(2)
    owing, idle = entered(slots, 2)
    slots.set_priority(owing, Priority.SENDING)
    slots.set_priority(idle, Priority.IDLE)
    [newcomer] = entered(slots, 1)
    assert idle.is_gone
    slots.set_priority(newcomer, Priority.ANSWERING)
    entered(slots, 1)
    assert owing.is_gone


def test_one_that_is_being_answered_is_never_closed() -> None:
    slots = ConnectionSlots(2)
    for connection in entered(slots, 2):
        slots.set_priority(connection, Priority.ANSWERING)
    late = FakeConnection()
    assert not slots.add(late)
    assert late.is_gone


def test_a_slot_that_was_left_is_free() -> None:
    slots = ConnectionSlots(1)
    [first] = entered(slots, 1)
    slots.remove(first)
    slots.remove(first)
    entered(slots, 1)
    assert not first.is_gone


def test_a_request_that_was_verified_marks_its_connection() -> None:
    connection = FakeConnection()
    mark_verified({SCOPE_KEY: connection})
    mark_verified({})
    assert connection.is_verified
