"""An agent's looks at its runs, in this process: no run here has code, so no process is started."""

import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.client.agent.runs import ONE, full_disk, run_named
from tests.client.agent.test_listing import Coordinator, page
from tests.client.agent.test_site_run import Process
from tests.federations.consortium import OFFICERS, first_list, signed
from tests.servers.waits import wait_until
from umbel.aggregation.messages import OpenRun
from umbel.aggregation.trust.members import members_bytes
from umbel.client.agent import agent as agent_module
from umbel.client.agent.agent import ENDED_SHOWN_MAX, PROCESSES_MAX, Agent, AgentOptions, FirstStart, run_agent
from umbel.client.agent.apps import AppRule
from umbel.client.agent.board import BoardFile, boards_in
from umbel.client.agent.decisions import DecisionStore, SiteDecision
from umbel.client.agent.listing import RUNS_MAX
from umbel.client.agent.notes import Doing, Note
from umbel.client.agent.order import ChildOrder
from umbel.client.agent.site_run import SupervisedRun
from umbel.client.agent.verdict import Stand
from umbel.client.agent.verdict_log import LINES_MAX, LINES_S
from umbel.client.errors import AccessRefused, StateError
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.state.home import Home
from umbel.client.state.state_dir import locked

SERVER = "http://fl.example.org"
NO_CODE = (AppRule("nothing", "json:client"),)
FIRST = first_list()
PLAIN = replace(ONE, is_secure=False)


def plain_run(name: str) -> OpenRun:
    return replace(run_named(name), is_secure=False)


class House:
    """One site. `open_runs`: what its coordinator lists."""

    def __init__(self, folder: Path, policy: str | None = None, apps: tuple[AppRule, ...] = NO_CODE) -> None:
        self.state, path = folder / "state", folder / "site.toml"
        if policy is not None:
            path.write_text(policy)
        options = AgentOptions(SERVER, self.state, apps, path if policy is not None else None)
        self.home = Home(self.state, SERVER)
        self.agent = Agent(options, self.home, "ward", Coordinator(page([])).client)

    def look(self, *open_runs: OpenRun) -> dict[str, tuple[str, str]]:
        """The state and the reason of each run on the board, after a look."""
        self.agent.watch.runs = {run.name: run for run in open_runs}
        self.agent.look(0.0)
        board = BoardFile(self.home.path).read()
        assert board is not None
        return {one.run.name: (one.state, one.reason) for one in board.runs}


def test_secure_runs_of_the_trusted_list_are_taken_and_others_refused(tmp_path: Path) -> None:
    (tmp_path / "pilot.json").write_bytes(members_bytes(signed(FIRST, *OFFICERS)))
    house = House(tmp_path, f'members = "pilot.json"\nmembers_sha256 = "{FIRST.sha256}"\nother_runs = "members"\n')
    mine, other = replace(ONE, members_sha256=FIRST.sha256), replace(run_named("mri"), members_sha256="d" * 64)
    found = house.look(mine, other, run_named("open"))
    assert {name: state for name, (state, _) in found.items()} == {
        "heart-1": Stand.NO_APP,
        "mri": Stand.REFUSED,
        "open": Stand.REFUSED,
    }


def test_a_damaged_decision_allows_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    house = House(tmp_path)
    DecisionStore(house.home.path).decide(ONE.name, SiteDecision.about(ONE, True, 1e9))
    assert house.look(ONE)["heart-1"][0] == Stand.NO_APP
    (house.home.path / "decisions" / "heart-1.json").write_text("{")
    state, reason = house.look(ONE)["heart-1"]
    assert state == Stand.ASKED
    assert "is damaged; remove it, and decide again" in reason


def test_a_policy_that_becomes_invalid_refuses_every_run(tmp_path: Path) -> None:
    house = House(tmp_path, 'allowed_runs = ["*"]\n')
    assert house.look(replace(PLAIN, is_secure=False))["heart-1"][0] == Stand.NO_APP
    (tmp_path / "site.toml").write_text('allowed_runs = "everything"\n')
    state, reason = house.look(replace(PLAIN, is_secure=False))["heart-1"]
    assert state == Stand.REFUSED
    assert "allowed_runs" in reason


def test_what_runs_have_left_that_are_over_is_removed_and_nothing_else(tmp_path: Path) -> None:
    house = House(tmp_path)
    for name in ("heart-1", "over"):
        (house.home.path / "runs" / name / "models").mkdir(parents=True)
    (house.home.path / "secure").mkdir()
    house.look(PLAIN)
    assert sorted(path.name for path in (house.home.path / "runs").iterdir()) == ["heart-1"]
    assert (house.home.path / "secure").is_dir()


def test_only_the_newest_runs_that_are_over_are_shown(tmp_path: Path) -> None:
    house = House(tmp_path)
    for i in range(ENDED_SHOWN_MAX + 5):
        house.look(plain_run(f"r{i:03}"))
    found = house.look(PLAIN)
    assert len(found) == ENDED_SHOWN_MAX + 1
    assert found["heart-1"][0] == Stand.ASKED
    assert found[f"r{ENDED_SHOWN_MAX + 4:03}"] == ("over", "the coordinator no longer lists it")


def test_a_coordinator_that_lists_other_runs_at_each_answer_fills_neither_the_log_nor_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    house = House(tmp_path)
    for i in range(3):
        house.agent.watch.runs = {run.name: run for run in (plain_run(f"r{i}-{j:03}") for j in range(RUNS_MAX))}
        house.agent.look(float(i))
        board = BoardFile(house.home.path).read()
        assert board is not None
        assert len(board.runs) <= RUNS_MAX + ENDED_SHOWN_MAX
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == LINES_MAX + 1
    assert lines[0].startswith("run r0-000: it is waiting for a person at this site; decide: umbel site allow r0-000")
    assert lines[-1].startswith(f"this log leaves out {RUNS_MAX - LINES_MAX} more verdicts on runs. ")
    assert "umbel site runs" in lines[-1]
    house.agent.look(LINES_S)
    assert caplog.records[-1].getMessage().startswith(f"this log leaves out {2 * RUNS_MAX} more verdicts")
    house.look(ONE)
    assert caplog.records[-1].getMessage().startswith("run heart-1: "), "a minute later there is room for lines again"


def test_a_full_disk_ends_no_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = House(tmp_path)
    assert list(house.look(PLAIN)) == ["heart-1"]
    with full_disk():
        for _ in range(3):
            assert list(house.look(PLAIN, plain_run("mri"))) == ["heart-1"], "the last board that could be written"
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
    assert list(house.look(PLAIN, plain_run("mri"))) == ["heart-1", "mri"]


def enrolled(folder: Path) -> AgentOptions:
    Home(folder, SERVER).remember_enrolment("ward")
    return AgentOptions(SERVER, folder, NO_CODE)


def test_it_ends_when_it_is_asked_to_and_its_board_says_so(tmp_path: Path) -> None:
    options, shutdown, ends = enrolled(tmp_path), Shutdown(), list[str]()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=httpx.ByteStream(page([]).content)))
    agent = threading.Thread(target=lambda: ends.append(run_agent(options, shutdown=shutdown, transport=transport)))
    agent.start()
    [home] = wait_until("its board", lambda: boards_in(tmp_path))
    assert BoardFile(home).is_alive()
    shutdown.request("the test is over")
    agent.join()
    assert ends == ["the test is over"]
    assert not BoardFile(home).is_alive()


def test_a_client_that_was_removed_ends_the_agent(tmp_path: Path) -> None:
    body = b'{"type":"urn:umbel:problem:client-removed","title":"removed","status":403,"detail":"the operator did it"}'
    transport = httpx.MockTransport(lambda request: httpx.Response(403, stream=httpx.ByteStream(body)))
    with pytest.raises(AccessRefused, match="client-removed"):
        run_agent(enrolled(tmp_path), FirstStart(), transport=transport)
    with locked(tmp_path):
        pass  # it holds the directory no longer


def test_a_join_and_an_agent_never_share_an_identity(tmp_path: Path) -> None:
    options = enrolled(tmp_path)
    with locked(tmp_path), pytest.raises(StateError, match=r"another client process uses .* end the other process"):
        run_agent(options)


def test_a_coordinator_that_lists_many_runs_does_not_fill_the_memory_with_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Process]()

    def start(order: ChildOrder, work: Path) -> Process:
        started.append(Process(order, work))
        return started[-1]

    monkeypatch.setattr(agent_module, "SupervisedRun", partial(SupervisedRun, start=start))
    house = House(tmp_path, 'allowed_runs = ["*"]\n', (AppRule("*", "heart:client"),))
    listed = [plain_run(f"run-{i:03}") for i in range(PROCESSES_MAX + 2)]
    house.look(*listed)
    found = house.look(*listed)
    assert len(started) == PROCESSES_MAX
    assert found["run-065"] == ("allowed", agent_module.NO_ROOM)
    started[0].end(Doing.OVER, "stopped: by the operator")
    house.look(*listed)
    house.look(*listed)
    assert len(started) == PROCESSES_MAX + 1


@pytest.mark.parametrize("doing", [Doing.WAITING, Doing.HELD_UP])
def test_processes_that_wait_and_those_of_runs_that_are_no_longer_listed_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: Doing
) -> None:
    started = list[Process]()

    def start(order: ChildOrder, work: Path) -> Process:
        started.append(Process(order, work))
        started[-1].newest = Note(doing, 0.0)
        return started[-1]

    monkeypatch.setattr(agent_module, "SupervisedRun", partial(SupervisedRun, start=start))
    house = House(tmp_path, 'allowed_runs = ["*"]\n', (AppRule("*", "heart:client"),))
    first = [plain_run(f"run-{i:03}") for i in range(PROCESSES_MAX)]
    house.look(*first)
    assert len(started) == PROCESSES_MAX
    others = [plain_run(f"later-{i:03}") for i in range(PROCESSES_MAX)]
    for _ in range(2):
        found = house.look(*others)  # the coordinator takes the first runs back, and their processes still wait
        assert found["later-000"] == ("allowed", agent_module.NO_ROOM)
    assert len(started) == PROCESSES_MAX


@pytest.mark.parametrize("ends", [False, True], ids=["unlisted", "agent-leaves"])
@pytest.mark.parametrize("denies", [False, True], ids=["policy", "person"])
def test_a_denial_also_counts_while_a_process_only_has_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool, denies: bool
) -> None:
    """Else a coordinator that takes a run off its list would still get the work of a site that no longer allows it."""
    started = list[Process]()

    def start(order: ChildOrder, work: Path) -> Process:
        started.append(Process(order, work))
        started[-1].newest = Note(Doing.TRAINING, 0.0)
        return started[-1]

    monkeypatch.setattr(agent_module, "SupervisedRun", partial(SupervisedRun, start=start))
    house = House(tmp_path, 'allowed_runs = ["*"]\n', (AppRule("*", "heart:client"),))
    house.look(PLAIN)
    [process] = started
    if not ends:
        house.look()
    assert process.withdrawn == 0
    if denies:
        DecisionStore(house.home.path).decide(PLAIN.name, SiteDecision.about(PLAIN, False, 1e9))
    else:
        (tmp_path / "site.toml").write_text('allowed_runs = ["mri-*"]\n')
    if ends:
        ending = threading.Thread(target=house.agent.end, daemon=True)
        ending.start()
        wait_until("its withdrawal", lambda: process.withdrawn)
        process.end(Doing.LEFT)
        ending.join()
    else:
        house.look()
    assert process.withdrawn == 1


def test_nothing_is_left_of_runs_that_a_coordinator_lists_and_takes_back(tmp_path: Path) -> None:
    house = House(tmp_path)
    for i in range(ENDED_SHOWN_MAX + 3):
        run = plain_run(f"run-{i:03}")
        house.look(run)
        (made := house.home.path / "runs" / run.name).mkdir(parents=True)
        (made / "model.safetensors").write_bytes(b"much")
    house.look()
    assert len(list((house.home.path / "runs").iterdir())) == ENDED_SHOWN_MAX
