"""The engines that call the ClientApps of nodes."""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import Array, ArrayRecord, RecordDict

from tests.client.flower.projects import TRAINS, project
from tests.servers.waits import wait_until
from umbel.client.channel import Channel
from umbel.client.flower.host import modules_of
from umbel.sim.engines.flower import processes, work
from umbel.sim.engines.flower.choose import AutoNodes, flower_engine
from umbel.sim.engines.flower.pieces import SharedPieces
from umbel.sim.engines.flower.processes import NodeProcesses
from umbel.sim.engines.flower.sequential import SequentialNodes
from umbel.sim.engines.flower.work import FlowerEngine, NodeAnswer, NodeApp, NodeCall, SentContent
from umbel.sim.engines.work import EngineError

pytestmark = pytest.mark.slow
N_NODES = 5
DRAWS = TRAINS.replace("one.numpy() + 1", "one.numpy() + np.random.rand()")
KEEPS = TRAINS.replace(
    "    arrays =",
    """
    n_before = context.state['n']['n'] if 'n' in context.state else 0
    context.state['n'] = MetricRecord({'n': n_before + 1})
    arrays =""",
    1,
)
SPOILS = TRAINS.replace(
    "    arrays =", "    message.content['arrays'] = ArrayRecord({})\n    return message.content\n    arrays =", 1
)
DIES = TRAINS.replace(
    "    arrays =",
    """    import os, signal, pathlib
    mark = pathlib.Path(__file__).with_name("mark")
    if context.node_config["partition-id"] == 2 and (EVERY_TIME or not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    arrays =""",
    1,
)


def app_in(folder: Path, client: str) -> NodeApp:
    return NodeApp(str(project(folder, client)), "small.client_app:app", {"epochs": 1}, N_NODES)


def calls(states: Sequence[bytes] = ()) -> list[NodeCall]:
    content = SentContent(0, RecordDict({"arrays": ArrayRecord({"w": Array(np.arange(3, dtype=np.float32))})}))
    told = {"run_id": 1, "src_node_id": 1, "reply_to_message_id": "", "group_id": "", "created_at": 1.0, "ttl": 9.0}
    return [
        NodeCall(
            number,
            content,
            told | {"message_id": f"m{number}", "dst_node_id": 100 + number, "message_type": "train"},
            seed=number,
            state=states[number] if states else b"",
        )
        for number in range(N_NODES)
    ]


def answers(engine: FlowerEngine, asked: list[NodeCall]) -> list[NodeAnswer]:
    found = dict(engine.run(asked))
    return [found[position] for position in range(len(asked))]


def values(found: list[NodeAnswer]) -> list[list[float]]:
    return [answer.content["arrays"]["w"].numpy().tolist() for answer in found if answer.content is not None]


def test_both_engines_draw_the_same_and_keep_what_a_node_keeps(tmp_path: Path) -> None:
    for name, client in (("draws", DRAWS), ("keeps", KEEPS)):
        app, found = app_in(tmp_path / name, client), list[list[NodeAnswer]]()
        with modules_of(Path(app.folder), [app.name]):
            for engine in (SequentialNodes(app), NodeProcesses(app, 2)):
                first = answers(engine, calls())
                found += [first, answers(engine, calls([answer.state for answer in first]))]
                engine.close()
        assert values(found[0]) == values(found[2])
        assert [answer.state for answer in found[1]] == [answer.state for answer in found[3]]
    assert all(b"" != one.state != two.state for one, two in zip(found[0], found[1], strict=True)), "a count of calls"


def test_a_node_that_changes_its_message_changes_no_other_s(tmp_path: Path) -> None:
    app, asked = app_in(tmp_path / "app", SPOILS), calls()
    with modules_of(Path(app.folder), [app.name]):
        found = answers(SequentialNodes(app), asked)
    assert {answer.error for answer in found} == {(2, "it returned a RecordDict; a ClientApp returns a Message")}
    assert list(asked[0].content.record["arrays"]) == ["w"]


def test_a_worker_that_dies_is_replaced_and_one_that_always_dies_ends_the_run(tmp_path: Path) -> None:
    once = NodeProcesses(app_in(tmp_path / "once", DIES.replace("EVERY_TIME", "False")), 2)
    assert values(answers(once, calls())) == [[1.0, 2.0, 3.0]] * N_NODES
    once.close()
    always = NodeProcesses(app_in(tmp_path / "always", DIES.replace("EVERY_TIME", "True")), 2)
    with pytest.raises(EngineError, match="workers died 3 times"):
        answers(always, calls())
    assert always.pids == []


def test_contents_are_open_only_until_the_last_node_has_got_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_made, n_open, n_most, (one, *_) = 0, 0, 0, calls()

    class Counted(SharedPieces):
        def __init__(self, pieces: Sequence[bytes]) -> None:
            nonlocal n_made, n_open, n_most
            super().__init__(pieces)
            n_made, n_open = n_made + 1, n_open + 1
            n_most = max(n_most, n_open)

        def close(self) -> None:
            nonlocal n_open
            super().close()
            n_open -= 1

    monkeypatch.setattr(work, "SharedPieces", Counted)
    contents = [SentContent(number, one.content.record) for number in range(60)]
    asked = [replace(one, number=i, content=contents[i % 60 if i < 120 else 0]) for i in range(150)]
    engine = NodeProcesses(app_in(tmp_path / "app", TRAINS), 2)
    assert values(answers(engine, asked)) == [[1.0, 2.0, 3.0]] * 150
    engine.close()
    assert n_open == 0
    assert n_made == 60, "a content that many nodes get is written once"
    assert n_most <= 8, "a process may have some hundred open files"


def test_a_message_that_cannot_be_sent_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(channel: Channel, asked: Sequence[NodeCall]) -> None:
        send_calls(channel, asked)  # so that this test also ends where the error is ignored
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    send_calls = processes.send_calls
    monkeypatch.setattr(processes, "send_calls", fails)
    engine = NodeProcesses(app_in(tmp_path / "app", TRAINS), 1)
    with pytest.raises(EngineError, match=r"nothing can be sent to worker 0: .*Too many open files"):
        answers(engine, calls())
    assert engine.pids == []


def test_what_one_node_raises_or_leaves_behind_is_its_own_error(tmp_path: Path) -> None:
    odd = """
    number = context.node_config["partition-id"]
    if number == 0:
        context.state = None
    if number == 1:
        raise BaseException("mine")
    if number == 2:
        return Message(RecordDict({"m": MetricRecord({"n": 2**70})}), reply_to=message)
    if number == 3:
        context.state["n"] = MetricRecord({"n": 2**70})
    arrays ="""
    app = app_in(tmp_path / "app", TRAINS.replace("\n    arrays =", odd, 1))
    with modules_of(Path(app.folder), [app.name]):
        found = answers(SequentialNodes(app), calls())
    told = [
        "its context.state is a NoneType; Flower keeps a RecordDict",
        "its own code failed with BaseException: mine",
    ]
    assert [one.error and one.error[1] for one in found[:2]] == told
    assert all(one.error and "its reply or state cannot be sent: ValueError" in one.error[1] for one in found[2:4])
    assert values(found[4:]) == [[1.0, 2.0, 3.0]]
    engine = NodeProcesses(app, 2)
    assert answers(engine, calls())[:4] == found[:4]
    engine.close()


def test_what_a_node_starts_ends_with_its_worker(tmp_path: Path) -> None:
    starts = """    import pathlib, subprocess
    number = context.node_config["partition-id"]
    pathlib.Path(f"PLACE/{number}").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    arrays ="""
    client = TRAINS.replace("    arrays =", starts.replace("PLACE", str(tmp_path)), 1)
    engine = NodeProcesses(app_in(tmp_path / "app", client), 1)
    answers(engine, calls())
    (worker,) = engine.pids
    started = [int((tmp_path / str(number)).read_text()) for number in range(N_NODES)]
    assert all(map(is_running, started))
    engine.close()
    wait_until("the end of what the nodes started", lambda: not any(map(is_running, [worker, *started])))


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.parametrize(
    ("client", "words"),
    [("1 / 0", "cannot be imported: ZeroDivisionError"), ("app = 3", "is a int; it must be a flwr ClientApp")],
)
@pytest.mark.parametrize("engine", ["auto", "processes"])
def test_an_app_that_cannot_be_made_ends_the_run(tmp_path: Path, client: str, words: str, engine: str) -> None:
    app = app_in(tmp_path / "app", client)
    with modules_of(Path(app.folder), [app.name]), pytest.raises(EngineError, match=words):
        answers(flower_engine(engine, app, 1), calls())


def test_auto_takes_this_process_for_what_is_quick(tmp_path: Path) -> None:
    app = app_in(tmp_path / "app", TRAINS)
    with modules_of(Path(app.folder), [app.name]):
        engine = AutoNodes(app, 2)
        assert engine.name == "auto"
        answers(engine, calls())
    assert engine.name == "sequential"
    assert engine.why.startswith("5 nodes worked for")
