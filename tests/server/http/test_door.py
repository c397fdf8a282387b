"""Who must go when all places are taken."""

from dataclasses import dataclass

from umbel.server.http.door import SCOPE_KEY, Claim, Door, vouch_for


@dataclass(eq=False)
class Someone:
    is_gone: bool = False
    is_known: bool = False

    def abort(self) -> None:
        self.is_gone = True

    def become_known(self) -> None:
        self.is_known = True


def entered(door: Door, count: int) -> list[Someone]:
    guests = [Someone() for _ in range(count)]
    for guest in guests:
        assert door.enter(guest)
    return guests


def test_strangers_go_first_the_oldest_before_the_others() -> None:
    door = Door(3)
    first, second, third = entered(door, 3)
    door.note(first, Claim.IDLE)
    entered(door, 1)
    assert [guest.is_gone for guest in (first, second, third)] == [False, True, False]


def test_then_those_between_requests_then_known_ones_that_owe() -> None:
    door = Door(2)
    owing, idle = entered(door, 2)
    door.note(owing, Claim.OWES)
    door.note(idle, Claim.IDLE)
    [newcomer] = entered(door, 1)
    assert idle.is_gone
    door.note(newcomer, Claim.ANSWERED)
    entered(door, 1)
    assert owing.is_gone


def test_who_is_being_answered_never_goes() -> None:
    door = Door(2)
    for guest in entered(door, 2):
        door.note(guest, Claim.ANSWERED)
    late = Someone()
    assert not door.enter(late)
    assert late.is_gone


def test_a_place_that_was_left_is_free() -> None:
    door = Door(1)
    [first] = entered(door, 1)
    door.leave(first)
    door.leave(first)
    entered(door, 1)
    assert not first.is_gone


def test_a_request_that_was_verified_vouches_for_its_connection() -> None:
    guest = Someone()
    vouch_for({SCOPE_KEY: guest})
    vouch_for({})
    assert guest.is_known
