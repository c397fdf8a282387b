"""What is remembered of who was heard of when."""

from tests.server.devices.clock_by_hand import ClockByHand
from umbel.server.devices.waiting import HEARD_S, Heard


def test_a_client_that_was_not_heard_of_yet_counts_as_heard_of_at_the_start() -> None:
    watch = ClockByHand()
    heard = Heard(watch)
    watch.time += 50
    assert heard.at("lab") == 1000.0
    heard.note("lab")
    assert heard.at("lab") == 1050.0


def test_who_was_heard_of_lately_is_remembered_to_the_moment() -> None:
    watch = ClockByHand()
    heard = Heard(watch)
    heard.note("lab")
    for _ in range(9):
        watch.time += HEARD_S / 10
        heard.note("other")
    assert heard.at("lab") == 1000.0
    watch.time += HEARD_S / 10
    heard.note("other")
    assert heard.at("lab") == 1000.0
    assert heard.at("other") == watch.time


def test_clients_that_come_once_are_not_remembered_for_ever() -> None:
    watch = ClockByHand()
    heard = Heard(watch)
    for i in range(100_000):
        watch.time += HEARD_S / 1000
        heard.note(f"phone-{i}")
        assert len(heard) <= 2010, "those of twice so long"
