"""The queues of the relay: a packet takes the time of two links and half of a round trip, and none is lost."""

import pytest

from umbel.sim.bench.collective.relay import Queues

RATE, DELAY_S = 1000.0, 0.5  # bytes a second
V4, V6 = 0x45, 0x60


def packet(receiver: int, n_bytes: int = 100, version: int = V4) -> bytes:
    """To the address 10.99.0.(receiver + 1)."""
    header = bytes([version, *[0] * 15, 10, 99, 0, receiver + 1])
    return header + bytes(n_bytes - len(header))


def queues(n_hosts: int = 3) -> Queues:
    return Queues(n_hosts, RATE, DELAY_S)


def arrivals(of: Queues) -> list[tuple[float, int, int]]:
    """When each packet arrives, at which host, and how long it is."""
    found = list[tuple[float, int, int]]()
    while (at := of.next_at()) is not None:
        assert of.due(at - 1e-9) == [], "it is not there before"
        found += [(round(at, 6), receiver, len(one)) for receiver, one in of.due(at)]
    return found


def test_a_packet_takes_its_bytes_on_both_links_and_half_of_the_round_trip() -> None:
    some = queues()
    some.sent(0, packet(1), now=10.0)
    assert arrivals(some) == [(10.0 + 0.1 + DELAY_S + 0.1, 1, 100)]


def test_packets_of_one_sender_leave_one_after_the_other() -> None:
    some = queues()
    for receiver in (1, 1, 2):
        some.sent(0, packet(receiver), now=10.0)
    assert arrivals(some) == [(10.7, 1, 100), (10.8, 1, 100), (10.9, 2, 100)]


def test_packets_of_two_senders_share_the_link_of_their_receiver() -> None:
    some = queues()
    some.sent(0, packet(2, 200), now=10.0)
    some.sent(1, packet(2, 100), now=10.0)
    some.sent(2, packet(0, 100), now=10.0)
    assert arrivals(some) == [(10.7, 0, 100), (10.9, 2, 200), (11.0, 2, 100)]


def test_a_link_that_was_idle_owes_no_time() -> None:
    some = queues()
    some.sent(0, packet(1), now=10.0)
    some.sent(0, packet(1), now=20.0)
    assert [at for at, _, _ in arrivals(some)] == [10.7, 20.7]


@pytest.mark.parametrize("bad", [packet(3), packet(-1), packet(1, version=V6), packet(1)[:19], b""])
def test_packets_for_no_host_are_dropped(bad: bytes) -> None:
    some = queues()
    some.sent(0, bad, now=10.0)
    assert some.next_at() is None
    some.sent(0, packet(1), now=10.0)
    assert arrivals(some) == [(10.7, 1, 100)], "and take no time"
