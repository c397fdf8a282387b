"""The examples of scikit-learn and numpy over HTTP: plain rounds with a killed client that resumes, and secure ones."""

import signal
import subprocess
import threading
from importlib import import_module
from pathlib import Path

import pytest

from tests.contracts.test_client_and_coordinator import Coordinator, coordinator, join
from tests.repository import ROOT
from tests.servers.waits import LIMIT_S, wait_until
from tests.suite.nights import at_night
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import Fate, RoundRecord
from umbel.client import ArrayClient, RunEnd, run_client

__all__ = ["coordinator"]  # a fixture
pytestmark = pytest.mark.slow
RUN = """
name = "arrays"
seed = 7
rounds = { count = 5, target = 4, minimum = 4, over_selection = 1.0, window_s = 600 }
training = { local_epochs = 2, batch_size = 16, learning_rate = 0.1, proximal_mu = 0.01, evaluate = true }
"""
MASKED = '[secure_aggregation]\n[codec]\nname = "integer"\n'
SLOW = """
import time
from examples import {example}
from umbel.client import ArrayData

class SlowData(ArrayData):
    def __getitem__(self, chosen):
        time.sleep(0.2)
        return super().__getitem__(chosen)

def client():
    made = {example}.client()
    made.data = SlowData(*made.data.arrays)
    return made
"""


class Hospitals:
    """The four sites of a run of an example."""

    def __init__(self, coordinator: Coordinator, folder: Path, example: str, run_file: str) -> None:
        self.coordinator, self.folder, self.example = coordinator, folder, f"examples.{example}"
        self.ends: dict[int, RunEnd] = {}
        first = self._app(0).model.state_dict()
        with coordinator.operator() as operator:
            operator.create_run("arrays", run_file, operator.upload_model(encode_model(first)))

    def start(self, *numbers: int) -> list[threading.Thread]:
        """These sites, each in a thread of this process."""
        threads = [threading.Thread(target=self._run, args=(one, self._app(one)), daemon=True) for one in numbers]
        for thread in threads:
            thread.start()
        return threads

    def join(self, app: str, cwd: Path, state: Path) -> "subprocess.Popen[str]":
        """Hospital 3 as a process of its own, as the command line starts it."""
        return join(self.coordinator, state, "arrays", app, cwd=cwd, HOSPITAL="3")

    def end(self, threads: list[threading.Thread]) -> RoundRecord:
        """Wait for the sites; returns the last round's record."""
        for thread in threads:
            thread.join(LIMIT_S)
        assert {end.status for end in self.ends.values()} == {"finished"}
        assert len(self.ends) == len(threads)
        with self.coordinator.operator() as operator:
            records = list(operator.progress("arrays").ended)
        trained = [one.round for one in records if one.committed and one.task is Task.TRAINING]
        assert trained == [1, 2, 3, 4, 5]
        assert [one.fate for one in records[-1].clients] == [Fate.ACCEPTED] * 4
        return records[-1]

    def _app(self, number: int) -> ArrayClient:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOSPITAL", str(number))
            app: ArrayClient = import_module(self.example).client()
            return app

    def _run(self, number: int, app: ArrayClient) -> None:
        with self.coordinator.operator() as operator:
            (token,) = operator.create_tokens()
        name = f"site-{number}"
        self.ends[number] = run_client(app, self.coordinator.url, self.folder / name, "arrays", token, name)


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["sklearn_hospital", *at_night("numpy_hospital")])
def test_hospitals_of_another_framework_train_one_model_and_a_killed_one_resumes(
    coordinator: Coordinator, tmp_path: Path, example: str
) -> None:
    hospitals = Hospitals(coordinator, tmp_path, example, RUN)
    (tmp_path / "slow.py").write_text(SLOW.format(example=example))
    threads = hospitals.start(0, 1, 2)
    first = hospitals.join("slow:client", tmp_path, tmp_path / "site-3")
    wait_until("a checkpoint of the slow site", lambda: list((tmp_path / "site-3").rglob("checkpoint.safetensors")))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    again = hospitals.join(f"examples.{example}:client", ROOT, tmp_path / "site-3")
    _, log = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, log
    assert "training resumes after step" in log
    assert hospitals.end(threads).evaluation["accuracy"] > 0.9


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["numpy_hospital", *at_night("sklearn_hospital")])
def test_hospitals_of_another_framework_train_under_masks(
    coordinator: Coordinator, tmp_path: Path, example: str
) -> None:
    hospitals = Hospitals(coordinator, tmp_path, example, RUN + MASKED)
    assert hospitals.end(hospitals.start(0, 1, 2, 3)).evaluation["accuracy"] > 0.9
