"""The whole demo: real coordinator, real client processes, real HTTP, real data."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.servers.interrupts import heed_interrupts
from tests.servers.waits import LIMIT_S, wait_until
from umbel.aggregation.trust.members import check_first, read_members
from umbel.client.policy.members_store import MembersStore
from umbel.client.state.identity import own_keys

PROMISED = (
    "accuracy pooled_accuracy local_accuracy_mean rounds clients selected reported partial dropped bytes_up bytes_down "
    "wall_s model_sha256 coordinator_kills chain replayed members_sha256"
)


def run_demo(out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "umbel", "demo", "--json", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def require_list_pinned(out: Path, sha256: str) -> None:
    """Every clinic of a demo that has kept its files has pinned this list, with its own key; none had to warn. The
    coordinator was given it, too.
    """
    (sites,) = out.glob("work-*/sites")
    with sqlite3.connect(sites.parent / "coordinator" / "umbel.db") as database:
        ((run, given),) = database.execute("SELECT run, text FROM member_lists").fetchall()
    database.close()
    assert (run, read_members(given.encode()).list.sha256) == ("demo", sha256)
    for number in range(1, 13):
        name = f"clinic-{number:02}"
        pin = MembersStore(sites / name / "state").pinned("demo")
        (own,) = own_keys(sites / name / "state")
        assert pin is not None
        assert pin.list.sha256 == sha256
        assert check_first(pin) == ("anna", "bert")
        assert pin.list.members[name] == own.public_key
        assert (len(pin.list.members), own.client) == (12, name)
    assert not [log for log in sites.glob("*.log") if "this site has no member list" in log.read_text()]


@pytest.mark.nightly
def test_a_federation_with_a_kill_and_slow_clients_comes_close_to_pooled_training(tmp_path: Path) -> None:
    summary = run_demo(tmp_path, "--keep")
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    fates = [(client["client"], client["fate"]) for line in rounds for client in line["clients"]]
    assert set(PROMISED.split()) <= summary.keys()
    assert summary["accuracy"] >= summary["pooled_accuracy"] - 0.03
    assert summary["accuracy"] >= summary["local_accuracy_mean"] + 0.2
    assert summary["partial"] >= 1
    assert ("clinic-10", "lost") in fates, "the killed client was never counted as lost"
    assert fates[::-1][[name for name, _ in fates[::-1]].index("clinic-10")][1] != "lost", "it never came back"
    assert (summary["rounds"], summary["clients"]) == (24, 12)
    assert rounds[-1]["model_sha256"] == summary["model_sha256"]
    assert summary["coordinator_kills"] == 1
    assert summary["chain"] == len(rounds) + 1, "the run's creation, and each attempt"
    assert summary["replayed"] == "", "nobody has an update of a secure round, so nobody can make it again"
    assert (tmp_path / "curves.png").stat().st_size > 50_000
    require_list_pinned(tmp_path, summary["members_sha256"])


@pytest.mark.slow
def test_six_rounds_outlive_a_killed_client_and_a_killed_coordinator(tmp_path: Path) -> None:
    """The day's part of the test above."""
    summary = run_demo(tmp_path, "--keep", "--rounds", "6")
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert set(PROMISED.split()) <= summary.keys()
    assert summary["rounds"] == 6
    assert rounds[-1]["model_sha256"] == summary["model_sha256"]
    assert summary["coordinator_kills"] == 1
    assert summary["chain"] == len(rounds) + 1, "the run's creation, and each attempt"
    require_list_pinned(tmp_path, summary["members_sha256"])


@pytest.mark.nightly
def test_two_calm_plain_demos_with_the_same_seed_give_the_same_model(tmp_path: Path) -> None:
    options = ("--plain", "--calm", "--rounds", "5", "--seed", "3")
    first, second = (run_demo(tmp_path / name, *options) for name in ("a", "b"))
    assert first["model_sha256"] == second["model_sha256"]
    assert (first["reported"], first["partial"], first["dropped"]) == (60, 0, 0)
    assert (first["coordinator_kills"], first["chain"], first["replayed"]) == (0, 6, first["model_sha256"])
    assert first["members_sha256"] == "", "nobody needs a list where nothing is hidden"


@pytest.mark.nightly
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "umbel", "demo", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heed_interrupts
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "enrols" in line:
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) >= 6
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(LIMIT_S) == 130
    wait_until("the end of all its processes", lambda: not any(child.is_running() for child in children))
