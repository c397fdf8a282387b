"""Flower apps train over HTTP, masked, without a line of them changed."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import NUMPY_CLIENT, NUMPY_SERVER, OWN_STRATEGY, WITH_STATE, project
from tests.contracts.house import House
from tests.repository import ROOT
from tests.servers.waits import LIMIT_S, wait_until
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.run.records import RoundRecord, VersionRecord

pytestmark = pytest.mark.slow
SITES = 3
RUN = """
name = "flowers"
rounds = {{ count = {count}, target = 3, minimum = 3, window_s = 600 }}
[training]
batch_size = 32
learning_rate = 0.1
evaluate = true
[secure_aggregation]
metrics = "all"
evaluation = "all"
"""
QUICKSTART = ROOT / "examples" / "flower_quickstart"


def umbel(*arguments: str, **environment: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "umbel", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def create(house: House, app: Path, folder: Path, count: int, sections: str = "") -> str:
    """Create the run with the app's own first model; returns what `model init` says of the run file."""
    first = folder / "first.safetensors"
    said = umbel("model", "init", "--flower-app", str(app), "--out", str(first))
    with house.operator() as operator:
        operator.create_run("flowers", RUN.format(count=count) + sections, operator.upload_model(first.read_bytes()))
    return said


@contextmanager
def joined(house: House, app: Path, folder: Path, number: int) -> Generator["subprocess.Popen[str]"]:
    """One site of the run, at work; killed at the end. It enrols with a token at its first start."""
    state = folder / f"state-{number}"
    command = ["join", "--server", house.url, "--run", "flowers", "--flower-app", str(app), "--name", f"site-{number}"]
    command += ["--node-config", f"partition-id={number} num-partitions={SITES}", "--state", str(state), "--json"]
    if not state.exists():
        with house.operator() as operator:
            command += ["--token", operator.create_tokens(1)[0]]
    with (folder / f"log-{number}").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "umbel", *command], stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(house: House, folder: Path, *sites: "subprocess.Popen[str]") -> tuple[list[RoundRecord], list[VersionRecord]]:
    """The rounds and models of the run, once it is over for all sites."""
    logs = [folder / f"log-{number}" for number in range(SITES)]
    for site in sites:
        printed, _ = site.communicate(timeout=LIMIT_S)
        assert json.loads(printed)["status"] == RunStatus.FINISHED.value, [log.read_text()[-2000:] for log in logs]
    with house.operator() as operator:
        records = [record for page in operator.ended("flowers") for record in page.ended if record.committed]
        return records, operator.versions("flowers")


def test_the_quickstart_learns_masked_and_its_last_model_is_measured(house: House, tmp_path: Path) -> None:
    assert "learning_rate = 0.1" in create(house, QUICKSTART, tmp_path, 6)
    with (
        joined(house, QUICKSTART, tmp_path, 0) as one,
        joined(house, QUICKSTART, tmp_path, 1) as two,
        joined(house, QUICKSTART, tmp_path, 2) as three,
    ):
        records, versions = ended(house, tmp_path, one, two, three)
    assert all(record.secure and record.reported == SITES for record in records)
    assert versions[-1].evaluation["eval_acc"] > 0.6, "ten digits, so 0.1 without training"
    assert versions[-1].metrics["train_loss"] < versions[1].metrics["train_loss"]


def test_a_numpy_client_learns_the_mean_of_all_sites(house: House, tmp_path: Path) -> None:
    app = project(tmp_path / "app", NUMPY_CLIENT, NUMPY_SERVER)
    create(house, app, tmp_path, 2, "[codec]\nstep = 0.02")
    with (
        joined(house, app, tmp_path, 0) as one,
        joined(house, app, tmp_path, 1) as two,
        joined(house, app, tmp_path, 2) as three,
    ):
        _, versions = ended(house, tmp_path, one, two, three)
    values = [version.evaluation["value"] for version in versions]
    # Steps are 0.007 and 0.011 (0.02 of the updates' root mean squares). Each of eight rotated values is off by less
    # than a step, so the mean of four values is off by less than sqrt(2) steps.
    assert values == pytest.approx([9.0, 9.0 + 0.1 * (1.0 - 9.0), 9.0 + 0.19 * (1.0 - 9.0)], abs=0.03)


def test_mods_and_the_state_of_the_context_of_an_app_with_its_own_strategy_outlive_a_kill(
    house: House, tmp_path: Path
) -> None:
    app = project(tmp_path / "app", WITH_STATE, OWN_STRATEGY)
    create(house, app, tmp_path, 4)
    with joined(house, app, tmp_path, 0) as one, joined(house, app, tmp_path, 1) as two:
        with joined(house, app, tmp_path, 2), house.operator() as operator:
            wait_until("two rounds", lambda: operator.versions("flowers")[-1].version >= 2)
        with joined(house, app, tmp_path, 2) as again:
            records, _ = ended(house, tmp_path, one, two, again)
    training = [record for record in records if record.task.makes_model]
    assert [record.metrics["calls"] for record in training] == [1.0, 2.0, 3.0, 4.0]
