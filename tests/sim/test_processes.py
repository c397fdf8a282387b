"""Processes are noticed when they die, and die when they are no longer wanted."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.servers import waits
from umbel.client import Operator
from umbel.sim.processes import ChildDied, start, start_coordinator, stopping, wait_until

SLEEPER = """
import sys, time
from umbel.sim.processes import when_the_starter_is_gone
import os
when_the_starter_is_gone(lambda: os._exit(0))
print("ready", flush=True)
time.sleep(600)
"""
STARTER = f"""
import sys, time
from pathlib import Path
from umbel.sim.processes import start
child = start("the sleeper", ["-c", {SLEEPER!r}], Path(sys.argv[1]))
child.stdout.readline()
print(child.process.pid, flush=True)
time.sleep(600)
"""

GROUP = """
import subprocess, sys, time
from umbel.sim.processes import kill_own_group, when_the_starter_is_gone
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
when_the_starter_is_gone(kill_own_group)
time.sleep(600)
"""
NO_LEADER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {GROUP!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
child.stdin.close()
print(child.wait(), flush=True)
"""


def test_a_child_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with stopping([]) as children:
        children.append(start("the teller", ["-c", "import sys; sys.exit('what went wrong')"], tmp_path / "log"))
        with pytest.raises(ChildDied, match=r"the teller ended unexpectedly \(exit status 1\)[\s\S]*what went wrong"):
            wait_until(lambda: False, children, 30, "a miracle")


def test_waiting_in_vain_says_for_what(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"waiting .* s for a miracle"):
        wait_until(lambda: False, [], 0.05, "a miracle")


def test_children_are_stopped_even_if_they_ignore_the_request(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    )
    with stopping([]) as children:
        children.append(child := start("the stubborn", ["-c", stubborn], tmp_path / "log"))
        child.stdout.readline()
        child.stop(grace_s=0.2)
    assert child.process.returncode == -signal.SIGKILL


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_coordinator_starts_again_over_its_files_at_its_address(tmp_path: Path) -> None:
    with stopping([]) as children:
        first = start_coordinator(tmp_path)
        children.append(first.child)
        with Operator(first.url, first.admin_key) as operator:
            audit_key = operator.audit_key()
            first.child.kill()
            again = start_coordinator(tmp_path, port=urlsplit(first.url).port or 0)
            children.append(again.child)
            assert (again.url, again.admin_key) == (first.url, first.admin_key)
            assert operator.audit_key() == audit_key
        assert again.pid != first.pid


def test_a_child_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        os.kill(starter.pid, signal.SIGKILL)
    waits.wait_until("the child's end", lambda: not is_running(child))


def test_a_process_whose_starter_is_gone_takes_along_what_it_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GROUP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdin is not None
        started = psutil.Process(int(leader.stdout.readline()))
        leader.stdin.close()
        assert leader.wait() == -signal.SIGKILL
    waits.wait_until("the end of what it started", lambda: not is_running(started))


def test_a_process_that_leads_no_group_spares_its_group() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NO_LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        started = psutil.Process(int(shell.stdout.readline()))
        assert shell.stdout.readline() == "1\n", "it has ended, and its starter goes on"
        assert is_running(started)
        started.kill()


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    return False
