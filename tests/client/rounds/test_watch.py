"""While a site trains, a thread asks whether the work is still wanted; it ends with the training."""

import threading

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.client.doubles.double import answer
from umbel.aggregation.types import AssignmentId
from umbel.client.rounds.watch import Watch
from umbel.client.state.identity import Identity
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Transport, connect

LONG_S = 60.0


class Eager(Watch):
    start_after_s = pause_s = 0.001


def test_a_training_that_has_ended_is_watched_no_longer() -> None:
    """The round stays open for hours: only the training's end can end the thread."""
    asked = threading.Event()

    def still_open(_: httpx.Request) -> httpx.Response:
        asked.set()
        return answer({"state": "open", "reason": "", "window_s": 3600.0})

    with connect("https://coordinator.test", httpx.MockTransport(still_open)) as replicas:
        coordinator = CoordinatorClient(Transport(replicas, Identity("d", Ed25519PrivateKey.generate()).authorize))
        with Eager(coordinator, AssignmentId("demo.1.1.watched"), 3600.0) as watch:
            assert asked.wait(LONG_S)
            [thread] = [one for one in threading.enumerate() if one.name == "watch demo.1.1.watched"]
            assert watch.ended is None
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_round_that_no_longer_wants_the_work_is_known_with_its_reason() -> None:
    with connect("https://coordinator.test", httpx.MockTransport(_closed)) as replicas:
        coordinator = CoordinatorClient(Transport(replicas, Identity("d", Ed25519PrivateKey.generate()).authorize))
        with Eager(coordinator, AssignmentId("demo.1.1.closed"), 3600.0) as watch:
            threads = [one for one in threading.enumerate() if one.name == "watch demo.1.1.closed"]
            for thread in threads:
                thread.join(LONG_S)
            assert watch.ended == "enough reports"


def _closed(_: httpx.Request) -> httpx.Response:
    return answer({"state": "closed", "reason": "enough reports", "window_s": 3600.0})
