"""A run with real clients and the real command line: paused over a kill, evaluated, rolled back, exported."""

import hashlib
import math
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contracts.house import House
from tests.contracts.test_client_and_coordinator import ends, start
from tests.servers.waits import LIMIT_S
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.plans.round import Task
from umbel.client import Client, Evaluation, LocalPlan, TrainResult, run_client
from umbel.client.loop import RunEnd

pytestmark = pytest.mark.slow
RUN = """
name = "life"
rounds = { count = 6, target = 1, over_selection = 1.0, window_s = 100 }
evaluation = { every = 1, clients = 2 }
stop = { metric = "evaluation.loss", target = 0.5, minimum = 2 }
retention = { versions = 2 }
"""


class Ward(Client):
    """Adds one to every weight; its loss is how far the weights are from five.

    With weights of `holds_at` or more it trains until it is told to stop, or `goes_on` is set.
    """

    def __init__(self, holds_at: float = math.inf) -> None:
        self.model, self.sample_count = nn.Linear(2, 1), 3
        self.measured = 0
        self.holds_at, self.goes_on = holds_at, threading.Event()

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        holds = float(next(model.parameters()).detach().mean()) >= self.holds_at
        while holds and not self.goes_on.wait(0.02) and not plan.should_stop():
            pass
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        return TrainResult(3, 1, 1, {"loss": 1.0})

    def evaluate(self, model: nn.Module) -> Evaluation:
        self.measured += 1
        return Evaluation(4, {"loss": abs(float(next(model.parameters()).detach().mean()) - 5.0)})


class Wards:
    """Three clients, each in a thread."""

    def __init__(self, house: House, directory: Path, holds_at: float = math.inf) -> None:
        self.apps = [Ward(holds_at) for _ in range(3)]
        self.ends: dict[int, RunEnd] = {}
        with house.operator() as operator:
            tokens = operator.create_tokens(3)
        self._threads = [
            threading.Thread(target=self._take_part, args=(i, house.url, directory / f"w{i}", token), daemon=True)
            for i, token in enumerate(tokens)
        ]
        for thread in self._threads:
            thread.start()

    def _take_part(self, number: int, url: str, state: Path, token: str) -> None:
        self.ends[number] = run_client(self.apps[number], url, state, "life", token, f"w{number}")

    def go_on(self) -> None:
        for app in self.apps:
            app.goes_on.set()

    def join(self) -> list[RunEnd]:
        for thread in self._threads:
            thread.join(LIMIT_S)
        return [self.ends[number] for number in range(3)]


def begin(house: House) -> None:
    state = {name: torch.zeros_like(value) for name, value in nn.Linear(2, 1).state_dict().items()}
    with house.operator() as operator:
        operator.create_run("life", RUN, operator.upload_model(encode_model(state)))


def until_round(house: House, number: int) -> None:
    """Wait for the evaluation of a round."""
    with house.operator() as operator:
        for progress in operator.follow("life", wait_s=5.0):
            if any(one.task is Task.EVALUATION and one.round >= number for one in progress.ended):
                return


def test_a_run_lives_through_pause_kill_rollback_and_ends_at_its_target(house: House, tmp_path: Path) -> None:
    begin(house)
    assert house.told("pause", "life", "--reason", "not yet")["status"] == "paused"
    wards = Wards(house, tmp_path, holds_at=2.0)  # no third round ends before the operator has paused the run
    house.restart()
    assert house.told("list")[0]["status"] == "paused"
    shown = house.umbel("show", "life")
    assert "the run is paused: not yet" in shown.stdout
    assert house.told("resume", "life")["status"] == "running"
    until_round(house, 2)
    paused = house.told("pause", "life", "--now")
    assert paused["status"] == "paused"
    wards.go_on()
    back = house.told("rollback", "life", "--to", "0", "--reason", "to see it")
    assert (back["status"], back["model"]["version"]) == ("paused", paused["model"]["version"] + 1)
    assert "has this model already" in house.umbel("rollback", "life", "--to", "0").stderr
    house.restart()
    assert house.told("resume", "life")["status"] == "running"
    reports = [end.accepted for end in wards.join()]
    assert {end.status for end in wards.ends.values()} <= {"finished"}
    with house.operator() as operator:
        progress = operator.progress("life")
        versions = operator.versions("life")
    assert progress.run.status is RunStatus.FINISHED
    assert sum(reports) == sum(record.reported for record in progress.ended if record.committed)
    assert sum(app.measured for app in wards.apps) >= 2
    assert [one.rolled_back_to for one in versions].count(0) == 1
    kept = [one.version for one in versions if one.deleted_at is None]
    assert kept[0] == 0
    assert kept[-2:] == [versions[-2].version, versions[-1].version]


def test_a_version_is_listed_and_exported_as_it_is(house: House, tmp_path: Path) -> None:
    begin(house)
    out, wards = tmp_path / "model.safetensors", Wards(house, tmp_path)
    assert {end.status for end in wards.join()} == {"finished"}
    watched = house.umbel("watch", "life")
    assert watched.exit_code == 0
    assert "stopped early after round 5 of 6: evaluation.loss has reached its target of 0.5" in watched.stdout
    assert "5 evaluation" in watched.stdout
    versions = house.told("versions", "life")
    assert [one["version"] for one in versions] == [0, 1, 2, 3, 4, 5]
    assert [one["evaluation"].get("loss") for one in versions] == [None, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert [one["version"] for one in versions if one["deleted_at"] is None] == [0, 4, 5]
    table = house.umbel("versions", "life").stdout
    assert "round 5" in table
    assert "deleted" in table
    for version in (None, 4, "best"):
        chosen = [] if version is None else ["--version", str(version)]
        facts = house.told("export", "life", "--out", str(out), *chosen)
        expected = versions[version if isinstance(version, int) else 5]
        assert (facts["version"], facts["round"], facts["run"]) == (expected["version"], expected["round"], "life")
        assert facts["sha256"] == expected["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
        assert facts["umbel"]
    for absent, sentence in (("2", "version 2 was deleted"), ("9", "no version 9, only 0 to 5")):
        refused = house.umbel("export", "life", "--out", str(tmp_path / "no.safetensors"), "--version", absent)
        assert refused.exit_code == 1
        assert sentence in refused.stderr
    assert not (tmp_path / "no.safetensors").exists()
    assert "the run is over (status: finished) and cannot be paused" in house.umbel("pause", "life").stderr
    assert ends(start("umbel.client.cli.runs.run_app", "--help")).count("rollback") >= 1


def test_watching_a_run_that_is_stopped_ends_with_status_one(house: House) -> None:
    begin(house)
    assert house.umbel("stop", "life", "--yes", "--reason", "enough").exit_code == 0
    assert house.umbel("watch", "life").exit_code == 1
    assert house.umbel("watch", "life", "--json").exit_code == 1
    assert "over already" in house.umbel("stop", "life", "--yes").stderr
