"""A process of a run that dies without a word is a failure, and the note of an earlier one is not taken for its own."""

import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.servers.waits import LIMIT_S, wait_until
from umbel.aggregation.types import RunId
from umbel.client.agent.notes import Doing, Note, Notebook, last_note
from umbel.client.agent.order import CHILD_ORDER, ChildOrder
from umbel.client.agent.process import RunProcess
from umbel.client.files import locked_file, make_private
from umbel.client.policy.decided import DecidedTerms
from umbel.client.policy.policy import SitePolicy
from umbel.client.state.home import Home
from umbel.client.state.state_dir import home_of, work_dir

pytestmark = pytest.mark.slow
SERVER = "http://127.0.0.1:9"
DECIDED = DecidedTerms(True, 3, True)


@pytest.fixture
def order(tmp_path: Path) -> ChildOrder:
    policy = SitePolicy(members=tmp_path / "pilot.json", allowed_runs=("heart-*",), epsilon=2.0)
    return ChildOrder(SERVER, tmp_path / "state", RunId("heart-1"), "nowhere:client", policy, DECIDED, 2)


@pytest.fixture
def work(order: ChildOrder) -> Path:
    home, _ = home_of(order.state, order.server)
    return make_private(work_dir(home, order.run))


def end_of(process: RunProcess) -> Note:
    return wait_until("its end", process.ended)


def test_an_order_is_one_line_and_comes_out_as_it_was(order: ChildOrder) -> None:
    assert order.line().count(b"\n") == 1
    assert CHILD_ORDER.validate_json(order.line()) == order


def test_code_that_is_not_there_is_named(order: ChildOrder, work: Path) -> None:
    end = end_of(RunProcess(order, work))
    assert end.doing is Doing.FAILED
    assert "no module 'nowhere' here" in end.reason


def test_a_killed_process_is_a_failure_whatever_an_earlier_one_has_noted(order: ChildOrder, work: Path) -> None:
    Notebook(work).note(Doing.LEFT, "earlier")
    process = RunProcess(order, work)
    os.kill(process.pid, signal.SIGKILL)
    end = end_of(process)
    assert end.doing is Doing.FAILED
    assert "SIGKILL" in end.reason


def test_one_that_finds_an_earlier_process_at_work_leaves_and_writes_nothing(order: ChildOrder, work: Path) -> None:
    with locked_file(work / "lock"):
        end = end_of(RunProcess(order, work))
    assert (end.doing, end.reason) == (Doing.LEFT, "an earlier process of this run is still at work")
    assert last_note(work) is None


def test_one_that_was_asked_to_leave_may_be_asked_again(order: ChildOrder, work: Path) -> None:
    process = RunProcess(order, work)
    process.leave()
    process.retire()
    process.leave()
    assert end_of(process).has_ended


def test_one_that_was_asked_to_leave_can_still_be_withdrawn(
    order: ChildOrder, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends what it has done, which may take long, and the site may deny the run meanwhile."""
    monkeypatch.setattr("umbel.client.agent.process._COMMAND", (sys.executable, "-c", SENDING, str(tmp_path / "said")))
    process = RunProcess(order, work)
    process.leave()
    wait_until("that it leaves", lambda: said(tmp_path).startswith("leaves"))
    process.withdraw()
    end_of(process)
    assert said(tmp_path) == "leaves: withdrawn"


@pytest.mark.parametrize("is_early", [False, True], ids=["later", "while it is loaded"])
def test_code_that_handles_signals_when_it_is_loaded_does_not_keep_the_process_from_leaving(
    order: ChildOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_early: bool
) -> None:
    (tmp_path / "nowhere.py").write_text(DEAF)
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as coordinator:  # it takes requests, and answers none
        order = replace(order, server=f"http://127.0.0.1:{coordinator.getsockname()[1]}", policy=None)
        home = Home(order.state, order.server)
        home.remember_enrolment("ward")
        process = RunProcess(order, make_private(work_dir(home.path, order.run)))
        try:
            wait_until("that it loads the code", (tmp_path / "loads").exists)
            if is_early:
                process.leave()
                wait_until("that the code has swallowed the order", (tmp_path / "swallowed").exists)
            (tmp_path / "go").touch()
            if not is_early:
                coordinator.settimeout(LIMIT_S)
                coordinator.accept()[0].close()
                process.leave()
            end = end_of(process)
        finally:
            process.kill()
    assert end.doing is Doing.LEFT, end.reason
    assert "SIGTERM received" in end.reason
    assert (tmp_path / "swallowed").exists() == is_early


DEAF = """
import signal, time
from pathlib import Path
import torch
from umbel.client import Client

signal.signal(signal.SIGTERM, lambda *_: Path("swallowed").touch())
Path("loads").touch()
while not Path("go").exists():
    time.sleep(0.01)

class Deaf(Client):
    def __init__(self):
        self.model, self.sample_count = torch.nn.Linear(2, 1), 3

    def train(self, model, plan):
        raise NotImplementedError

client = Deaf
"""


def said(folder: Path) -> str:
    path = folder / "said"
    return path.read_text() if path.exists() else ""


SENDING = """
import sys, time
from pathlib import Path
from umbel.client.agent.child import Orders, private_pipe
from umbel.client.rounds.shutdown import Interrupted, Shutdown

pipe, shutdown, out = private_pipe(), Shutdown(), Path(sys.argv[1])
pipe.readline()
with shutdown.on_signals():
    Orders(pipe, shutdown)
    try:
        while shutdown.reason is None:
            time.sleep(0.01)
        out.write_text("leaves")
        while True:
            time.sleep(0.01)
    except Interrupted:
        out.write_text("leaves: withdrawn" if shutdown.is_withdrawn else "interrupted")
"""


def test_one_that_ends_without_an_error_and_without_a_note_has_failed(
    order: ChildOrder, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last note found no room on the disk: whether its run is over is not known."""
    monkeypatch.setattr("umbel.client.agent.process._COMMAND", (sys.executable, "-c", "input()"))
    end = end_of(RunProcess(order, work))
    assert end.doing is Doing.FAILED
    assert "could not note why" in end.reason


def test_a_damaged_note_counts_as_none(work: Path) -> None:
    Notebook(work)
    (work / "note.json").write_text("{")
    assert last_note(work) is None


def test_the_current_directory_cannot_replace_what_the_process_is_made_of(
    order: ChildOrder, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "nowhere.py").write_text("client = 1\n")
    monkeypatch.chdir(tmp_path)
    assert "nowhere:client is a int" in end_of(RunProcess(order, work)).reason, "the site's own code is found there"
