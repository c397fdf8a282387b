"""A client whose site no longer allows the run sends nothing more, whatever has swallowed the order to leave."""

import logging
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from tests.client.doubles.double import TOKEN, URL, Double, Handler
from tests.client.doubles.secure_double import WARD, SecureDouble
from tests.client.test_loop import AddOne, Crash, Measuring, killed_at, take_part
from tests.client.test_secure_rounds import Ward
from umbel.aggregation.types import RunId
from umbel.client import Client, Evaluation, LocalPlan, TrainResult, run_client
from umbel.client.rounds.shutdown import Interrupted, Shutdown
from umbel.client.state.failures import Failures
from umbel.client.state.store import Store

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
    ("at", "accepted", "says"),
    [
        ("/models/", 0, "nothing of it was sent"),
        ("/update", 0, "some of it may have been sent before; nothing more is sent"),
        ("/report", 1, "some of it may have been sent before; nothing more is sent"),
        ("/secure/consistency-check", 1, "some of it may have been sent before; nothing more is sent"),
    ],
)
def test_a_withdrawn_client_sends_nothing_more_although_the_order_was_swallowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: str, accepted: int, says: str
) -> None:
    caplog.set_level(logging.INFO)
    double, shutdown, withdrawn, after = SecureDouble(Ward().model), Shutdown(), threading.Event(), list[str]()
    advertised = threading.Event()

    def listen(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            path = request.url.path
            if at == "/models/" and at in path:
                advertised.wait(LONG_S)  # the other thread has signed this request before the withdrawal
            if withdrawn.is_set() and request.method != "GET":
                after.append(path.rpartition("/")[2])
            if at in path and not withdrawn.is_set():
                Garbage(shutdown)
                withdrawn.set()
            if at == "/models/" and path.endswith("/share-keys"):
                withdrawn.wait(LONG_S)  # the thread that exchanges keys learns the roster only now
            if path.endswith("/advertise-keys"):
                advertised.set()
            return handler(request)

        return handle

    transport = double.transport(listen)
    end = run_client(Ward(), URL, tmp_path, "demo", TOKEN, WARD, transport=transport, shutdown=shutdown)
    assert withdrawn.is_set()
    assert (end.status, end.reason, end.accepted, end.opened) == ("interrupted", WHY, accepted, 0)
    assert set(after) <= {"decline"}
    [line] = [record.getMessage() for record in caplog.records if "was discarded" in record.getMessage()]
    assert line.startswith("round 1: this site no longer takes part in the run; this client's work was discarded: ")
    assert says in line


def test_a_client_that_is_withdrawn_while_it_sends_what_an_earlier_process_left_discards_that_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    double, shutdown = Double(AddOne().model), Shutdown()
    with pytest.raises(Crash):
        take_part(tmp_path, double, wrap=killed_at("PUT report", was_carried_out=False))

    def withdrawn(handler: Handler) -> Handler:
        def handle(request: httpx.Request) -> httpx.Response:
            if shutdown.reason is None:
                shutdown.withdraw(WHY)
            return handler(request)

        return handle

    end = run_client(
        AddOne(), URL, tmp_path, "demo", TOKEN, WARD, transport=double.transport(withdrawn), shutdown=shutdown
    )
    assert (end.status, end.reason, end.reports) == ("interrupted", WHY, 0)
    assert not list(tmp_path.glob("*/pending/*"))
    assert "this client's work was discarded: some of it may have been sent before" in caplog.text


class Swallowing(Client):
    """Code of a site that is denied the run while it works, and that swallows the order to leave. `then`: what it does
    next. `begins`: what it waits for before.
    """

    def __init__(self, shutdown: Shutdown, then: str, begins: threading.Event | None = None) -> None:
        self.model, self.sample_count = nn.Linear(30, 10), 5
        self._shutdown, self._then, self._begins = shutdown, then, begins

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self._swallow()
        if self._then == "diverges":
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return TrainResult(self.sample_count, 4, 4, {})

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        self._swallow()
        return None if self._then == "has nothing held out" else Evaluation(3, {"accuracy": 0.5})

    def _swallow(self) -> None:
        assert self._begins is None or self._begins.wait(LONG_S)
        with suppress(Interrupted):
            self._shutdown.withdraw(WHY)
        if self._then == "fails":
            raise RuntimeError("a worker of the loader was ended")


@pytest.mark.parametrize("then", ["goes on", "diverges", "has nothing held out", "fails"])
@pytest.mark.parametrize("kind", [Double, Measuring])
def test_a_withdrawn_client_does_not_say_how_its_work_went(tmp_path: Path, kind: type[Double], then: str) -> None:
    app = Swallowing(shutdown := Shutdown(), then)
    double = kind(app.model)
    end = run_client(app, URL, tmp_path, "demo", TOKEN, WARD, transport=double.transport(), shutdown=shutdown)
    assert (end.status, end.reason, end.reports) == ("interrupted", WHY, 0)
    assert list(double.declined.values()) == ["this site no longer takes part in the run"]
    assert not list(tmp_path.glob("*/pending/*"))


@pytest.mark.parametrize("then", ["goes on", "fails"])
@pytest.mark.parametrize("measures", [False, True])
def test_a_withdrawn_client_leaves_a_secure_round_at_once_and_remembers_no_sum(
    tmp_path: Path, then: str, *, measures: bool
) -> None:
    waits, shutdown = threading.Event(), Shutdown()

    def later(_inbox: bytes) -> None:
        """Other clients' shares are missing."""
        waits.set()

    app = Swallowing(shutdown, then, begins=waits)
    double = SecureDouble(app.model)
    double.measures, double.told["masked-input"] = measures, later
    end = run_client(app, URL, tmp_path, "demo", TOKEN, WARD, transport=double.transport(), shutdown=shutdown)
    assert (end.status, end.reason, end.reports) == ("interrupted", WHY, 0)
    assert list(double.declined.values()) == ["this site no longer takes part in the run"]
    store = Store(tmp_path, URL)
    assert store.secure.sums_of_all_runs() == {}
    assert store.failures.of(RunId("demo")) == Failures(), "the site's code did not fail by itself"
