"""A client whose site no longer allows the run sends nothing more, whatever has swallowed the order to leave."""

import threading
from pathlib import Path

import httpx
import pytest

from tests.client.doubles.double import TOKEN, URL, Handler
from tests.client.doubles.secure_double import WARD, SecureDouble
from tests.client.test_secure_rounds import Ward
from umbel.client import run_client
from umbel.client.rounds.shutdown import Shutdown

LONG_S = 60.0
WHY = "a person denied the run"


class Garbage:
    """What a site's code may leave, such as a data loader: Python drops what is raised in its `__del__`."""

    def __init__(self, shutdown: Shutdown) -> None:
        self._shutdown = shutdown

    def __del__(self) -> None:
        self._shutdown.withdraw(WHY)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("at", "accepted"), [("/models/", 0), ("/update", 0), ("/report", 1), ("/secure/consistency-check", 1)]
)
def test_a_withdrawn_client_sends_nothing_more_although_the_order_was_swallowed(
    tmp_path: Path, at: str, accepted: int
) -> None:
    double, shutdown, withdrawn, after = SecureDouble(Ward().model), Shutdown(), threading.Event(), list[str]()

    def listen(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            path = request.url.path
            if withdrawn.is_set() and request.method != "GET":
                after.append(path.rpartition("/")[2])
            if at in path and not withdrawn.is_set():
                Garbage(shutdown)
                withdrawn.set()
            if at == "/models/" and path.endswith("/share-keys"):
                withdrawn.wait(LONG_S)  # the thread that exchanges keys learns the roster only now
            return handler(request)

        return handle

    transport = double.transport(listen)
    end = run_client(Ward(), URL, tmp_path, "demo", TOKEN, WARD, transport=transport, shutdown=shutdown)
    assert withdrawn.is_set()
    assert (end.status, end.reason, end.accepted, end.opened) == ("interrupted", WHY, accepted, 0)
    assert set(after) <= {"decline"}
