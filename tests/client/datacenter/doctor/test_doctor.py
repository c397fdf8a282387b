"""`umbel doctor --distributed` as a person calls it: in one process, and under torchrun with real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.client.datacenter.doctor.jobs import HERE, RUN_FILE
from umbel.__main__ import app, mount

# Read by Python at its start: on rank 1 it says another version of Python.
PLANTED = """
import os
import platform

if os.environ.get("RANK") == "1":
    platform.python_version = lambda: "3.99.0"
"""


def call(*words: str) -> tuple[int, str]:
    mount()
    done = CliRunner().invoke(app, ["doctor", *words])
    return done.exit_code, done.output


def test_a_run_file_and_a_client_go_together_and_with_distributed(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    for words in (
        ["--distributed", str(file)],
        ["--distributed", "--app", "a:b"],
        [str(file), "--app", "a:b"],
    ):
        status, text = call(*words)
        assert status == 2
        assert "go together" in text

    for words in (["--distributed", "--ranks-per-client", "2"], ["--ranks-per-client", "2"]):
        status, text = call(*words)
        assert status == 2
        assert "--ranks-per-client goes with --distributed" in " ".join(text.split())


@pytest.mark.slow
def test_one_process_is_the_only_rank() -> None:
    status, text = call("--distributed", "--json")
    found = json.loads(text)
    assert status == 0
    assert [(one["check"], one["verdict"]) for one in found["findings"]][-1] == ("network", "skipped")
    assert len(found["ranks"]) == 1
    assert found["job"] is None


@pytest.mark.slow
def test_one_process_can_time_its_own_job(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    status, text = call("--distributed", str(file), "--app", f"{HERE}:make_compute_bound")
    assert status == 0, text
    assert "compute-bound: " in text
    assert "it fits, so replicate" in " ".join(text.split())
    status, text = call("--distributed", str(file), "--app", f"{HERE}:make_deaf", "--json")
    assert status == 1
    (wrong,) = [one for one in json.loads(text)["findings"] if one["verdict"] == "wrong"]
    assert wrong["found"].endswith("call plan.should_stop() between two steps")


@pytest.mark.nightly
def test_clients_of_several_ranks_are_measured_as_a_person_calls_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE.replace("target = 1", "target = 2, minimum = 2, over_selection = 1.0"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    app = "tests.client.datacenter.train.divided_clients:sharded"
    doctor = ["-m", "umbel", "doctor", "--distributed", str(tmp_path / "run.toml"), "--app", app]
    done = subprocess.run(
        [*launcher, *doctor, "--ranks-per-client", "2", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (len(found["ranks"]), found["job"]["ranks_per_client"], len(found["job"]["alone_s"])) == (4, 2, 2)
    verdicts = {one["check"]: one["verdict"] for one in found["findings"]}
    assert verdicts["advice"] == "skipped"
    assert {"memory", "bottleneck", "codecs", "umbel train", "sum times"} <= verdicts.keys()


@pytest.mark.slow
def test_a_planted_mismatch_ends_torchrun_with_status_1_and_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    paths = os.pathsep.join([str(tmp_path), os.getcwd(), *sys.path])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "umbel", "doctor", "--distributed", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)  # rank 0 alone prints
    wrong = [one["found"] for one in found["findings"] if one["verdict"] == "wrong"]
    assert len(wrong) == 1
    assert wrong[0].startswith("rank 1 (on ")
    assert "has Python 3.99.0, but rank 0 (on " in wrong[0]
    assert found["network"]["of_sums"]["bytes_per_s"] > 0
