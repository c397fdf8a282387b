"""The process of a ClientApp: made once, killed when a call must end, and replaced."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import TRAINS, project
from tests.servers.waits import LIMIT_S, wait_until
from umbel.client.errors import AppError
from umbel.client.flower.calls import AppFailed, AppStopped, Call
from umbel.client.flower.process import AppProcess
from umbel.client.flower.project import read_project

pytestmark = pytest.mark.slow
WEIGHTS = {"w": np.zeros((2, 4), dtype=np.float32)}
NEVER_ENDS = """
import os, pathlib, subprocess, time
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    print("it prints")
    helper = subprocess.Popen(["sleep", "1000"])
    (pathlib.Path(__file__).parent.parent / "pid").write_text(f"{os.getpid()} {helper.pid}")
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def process(tmp_path: Path) -> Generator[AppProcess]:
    made = process_of(tmp_path)
    yield made
    made.close()


def process_of(folder: Path, client: str = TRAINS) -> AppProcess:
    return AppProcess(read_project(str(project(folder, client))), {"partition-id": 3})


def no() -> None:
    """Nothing asks to stop."""


def ended(pid: int) -> bool:
    """Whether there is no such process, or only what its parent has not asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_one_process_answers_call_after_call(process: AppProcess) -> None:
    process.start()
    assert process.kinds == ["train"]
    answer = process.call(Call("train", {}, WEIGHTS), no)
    assert answer.sample_count == 13
    again = process.call(Call("train", {}, answer.arrays, answer.state), no)
    assert np.array_equal(again.arrays["w"], WEIGHTS["w"] + 2)


def test_a_call_that_must_stop_ends_the_process_and_the_next_call_has_another(tmp_path: Path) -> None:
    process = process_of(tmp_path, NEVER_ENDS)
    begun = tmp_path / "pid"
    with pytest.raises(AppStopped, match="the round is over"):
        process.call(Call("train", {}, WEIGHTS), lambda: "the round is over" if begun.exists() else None)
    wait_until("the end of the app's processes", lambda: all(map(ended, map(int, begun.read_text().split()))))
    (tmp_path / "small" / "client_app.py").write_text(TRAINS)
    assert process.call(Call("train", {}, WEIGHTS), no).sample_count == 13
    process.close()


SOCKET = "import os, socket, sys, time; end = socket.socket(fileno=os.dup(int(sys.argv[1]))); "


def in_train(code: str) -> str:
    return TRAINS.replace("    arrays = {", f"    {code}\n    arrays = {{", 1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (SOCKET + "end.shutdown(socket.SHUT_WR); time.sleep(1000)", "it closed its socket"),
        ("import os, time; os.closerange(3, 200); time.sleep(1000)", "it closed its socket"),
        ("import os, time; os.fork() or time.sleep(1000); os._exit(3)", "exit status 3"),  # the socket stays open
        ("import os; os.kill(os.getpid(), 37); import time; time.sleep(1000)", "killed by signal 37"),
        (SOCKET + "end.send((10).to_bytes(8, 'little') + b'abcdefghij'); time.sleep(1000)", "what is no answer"),
        (SOCKET + "end.send(b'\\xff' * 8); time.sleep(1000)", "what is no answer"),
        (SOCKET + "end.send((2).to_bytes(8, 'little') + b'[]'); time.sleep(1000)", "what is no answer"),
    ],
)
def test_an_app_that_spoils_its_socket_is_ended(tmp_path: Path, code: str, words: str) -> None:
    process = process_of(tmp_path, in_train(code))
    process.start()
    pid = process.pid
    assert pid is not None
    with pytest.raises(AppFailed, match=words):
        process.call(Call("train", {}, WEIGHTS), no)
    assert ended(pid)
    assert process.pid is None


@pytest.mark.parametrize(
    "code",
    [
        SOCKET + "end.send(b'\\x10\\0\\0'); time.sleep(1000)",  # it stops in the middle of a message
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_an_app_that_halts_anywhere_can_be_stopped(tmp_path: Path, code: str) -> None:
    process, looks = process_of(tmp_path, in_train(code)), iter([None] * 3)
    process.start()
    with pytest.raises(AppStopped, match="leaving"):
        process.call(Call("train", {}, WEIGHTS), lambda: next(looks, "leaving"))
    assert process.pid is None


def test_an_app_that_reads_no_more_can_be_stopped(process: AppProcess) -> None:
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    large, looks = {"w": np.zeros(10_000_000, dtype=np.float32)}, iter([None] * 3)
    with pytest.raises(AppStopped, match="leaving"):
        process.call(Call("train", {}, large), lambda: next(looks, "leaving"))
    assert process.pid is None


def test_a_process_that_is_killed_between_two_calls_is_replaced(process: AppProcess) -> None:
    process.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its last thread has ended
    assert process.call(Call("train", {}, WEIGHTS), no).sample_count == 13


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("app = 3", "is a int; it must be a flwr ClientApp"),
        ("", "has no 'app'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "exit status 7"),
    ],
)
def test_an_app_that_cannot_be_made_is_told_in_a_sentence(tmp_path: Path, code: str, words: str) -> None:
    process = process_of(tmp_path, code)
    with pytest.raises(AppError, match=words):
        process.start()


def test_an_error_of_the_app_keeps_its_message_from_the_coordinator(tmp_path: Path) -> None:
    process = process_of(
        tmp_path, TRAINS.replace("    arrays =", '    raise ValueError("patient 12 has no age")\n    arrays =')
    )
    with pytest.raises(AppFailed, match=r"ValueError: patient 12 has no age \(client_app.py, line 10\)") as told:
        process.call(Call("train", {}, WEIGHTS), no)
    assert told.value.public == "the client's own code failed with ValueError; see the client's log"
    process.close()


def test_the_app_ends_with_its_starter_however_that_ends(tmp_path: Path) -> None:
    folder, begun = project(tmp_path, NEVER_ENDS), tmp_path / "pid"
    code = (
        "import sys, numpy as np\n"
        "from umbel.client.flower.calls import Call\n"
        "from umbel.client.flower.process import AppProcess\n"
        "from umbel.client.flower.project import read_project\n"
        "call = Call('train', {}, {'w': np.zeros(1, np.float32)})\n"
        "AppProcess(read_project(sys.argv[1]), {}).call(call, lambda: None)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    pids = wait_until(
        "the app and its helper", lambda: [*map(int, begun.read_text().split())] if begun.exists() else []
    )
    starter.kill()
    printed, errors = starter.communicate(timeout=LIMIT_S)
    wait_until("the end of the app's processes", lambda: all(map(ended, pids)))
    assert printed == b"", "what the app prints is no output of the client"
    assert b"Traceback" not in errors


def test_an_app_that_misses_its_node_config_is_told_where_it_comes_from(tmp_path: Path) -> None:
    app = project(tmp_path, TRAINS.replace('.get("partition-id", 0)', '["partition-id"]'))
    process = AppProcess(read_project(str(app)), {})
    with pytest.raises(AppFailed, match=r"KeyError: 'partition-id' .*; --node-config gives the app its context"):
        process.call(Call("train", {}, WEIGHTS), no)
    process.close()
