"""Whom a coordinator calls silent, by the requests that a client holds open and by those that come after."""

from dataclasses import dataclass, field

import pytest
from starlette.types import Message

from tests.server.devices.clock_by_hand import ClockByHand
from umbel.aggregation.types import ClientId
from umbel.server.devices.signs_of_life import SignsOfLife
from umbel.server.devices.waiting import Heard, HeldRequest

LAB = ClientId("lab")
WINDOW_S, CUT_S, QUIET_S = 600.0, 10.0, 60.0
NEVER = float("inf")


def request() -> HeldRequest:
    async def receive() -> Message:
        raise AssertionError("nothing here reads")

    return HeldRequest(receive)


@dataclass
class Desk:
    clock: ClockByHand = field(default_factory=ClockByHand)
    n_woken: int = 0

    def __post_init__(self) -> None:
        self.heard = Heard(self.clock)
        self.signs = SignsOfLife(self.heard, self.clock, self._wake)

    def _wake(self) -> None:
        self.n_woken += 1

    def poll(self, held_s: float, *, is_cut: bool = False, round_id: int = 1) -> None:
        """The client holds a status request open for so long."""
        self.heard.note(LAB)
        line = request()
        with self.signs.watching(round_id, LAB, line):
            assert self.silent_after() == NEVER, "it is alive while its request is open"
            self.clock.time += held_s
            if is_cut:
                line.let_go()

    def silent_after(self, since: float = 0.0) -> float:
        """In how many seconds it will be silent."""
        return self.signs.silent_at(LAB, WINDOW_S, since) - self.clock.time


def test_a_client_that_holds_no_request_open_is_never_silent() -> None:
    desk = Desk()
    desk.heard.note(LAB)
    desk.clock.time += 10_000
    assert desk.silent_after() == NEVER


def test_a_client_that_disconnects_is_silent_sooner_than_one_that_was_answered() -> None:
    cut, answered = Desk(), Desk()
    cut.poll(24.0, is_cut=True)
    answered.poll(24.0)
    assert (cut.silent_after(), answered.silent_after()) == (CUT_S, QUIET_S)
    assert (cut.n_woken, cut.signs.n_away) == (1, 1)


def test_any_request_after_it_is_a_sign_of_life() -> None:
    desk = Desk()
    desk.poll(24.0, is_cut=True)
    desk.clock.time += 9.0
    desk.heard.note(LAB)
    assert desk.silent_after() == QUIET_S


def test_time_before_the_end_of_an_outage_does_not_count() -> None:
    desk = Desk()
    desk.poll(24.0, is_cut=True)
    desk.clock.time += 100.0
    assert desk.silent_after(since=desk.clock.time - 1.0) == CUT_S - 1.0


def test_a_client_may_be_quiet_for_three_times_its_longest_gap() -> None:
    desk = Desk()
    desk.poll(24.0)
    desk.clock.time += 50.0
    desk.poll(24.0)
    assert desk.silent_after() == 150.0


def test_a_cut_is_no_gap_of_the_clients_own() -> None:
    desk = Desk()
    desk.poll(24.0, is_cut=True)
    desk.clock.time += 300.0
    desk.poll(24.0)
    assert desk.silent_after() == QUIET_S


def test_a_client_that_was_called_silent_and_comes_back_is_waited_for_longer_in_the_next_round() -> None:
    desk = Desk()
    desk.poll(24.0)
    desk.clock.time += 70.0
    desk.signs.left_behind([LAB], WINDOW_S)
    desk.clock.time += 30.0
    desk.signs.asked(LAB, None)
    desk.poll(24.0, round_id=2)
    assert desk.silent_after() == 300.0


@pytest.mark.parametrize(("away_s", "asks_in"), [(36_000.0, None), (36_000.0, 2), (30.0, 2)])
def test_a_client_that_was_dead_for_a_while_is_waited_for_no_longer_when_it_dies_again(
    away_s: float, asks_in: int | None
) -> None:
    desk = Desk()
    desk.poll(24.0)
    desk.clock.time += 70.0
    desk.signs.left_behind([LAB], WINDOW_S)
    desk.clock.time += away_s
    desk.signs.asked(LAB, asks_in)
    desk.poll(24.0, round_id=2)
    assert desk.silent_after() == QUIET_S


def test_a_client_that_has_reported_is_forgotten_and_so_is_an_earlier_attempt() -> None:
    desk = Desk()
    desk.poll(24.0)
    desk.signs.reported(LAB)
    assert (desk.signs.n_away, desk.silent_after()) == (0, NEVER)
    desk.poll(24.0)
    with desk.signs.watching(2, ClientId("ward"), request()):
        assert (desk.signs.n_away, desk.silent_after()) == (0, NEVER)


def test_a_client_is_alive_while_one_of_two_requests_is_open() -> None:
    desk = Desk()
    with desk.signs.watching(1, LAB, request()):
        desk.poll(24.0, is_cut=True)
        assert (desk.silent_after(), desk.signs.n_away, desk.n_woken) == (NEVER, 0, 0)
    assert desk.silent_after() == QUIET_S
