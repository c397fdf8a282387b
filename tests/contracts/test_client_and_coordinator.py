"""Both real ends over real sockets: a coordinator process and client processes, as the command line starts them."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.client.doubles.double import kind_of
from tests.repository import ROOT
from tests.servers.waits import LIMIT_S, wait_for_file, wait_until
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.run.records import Fate
from umbel.client import Client, LocalPlan, Operator, TrainResult, run_client
from umbel.client.state.enrol import ensure_enrolled, identify
from umbel.client.state.home import Home
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.timing import CHUNK_BYTES_MAX
from umbel.client.wire.transport import Transport, connect

pytestmark = pytest.mark.slow

PATIENT_APP = """
import os, time
import torch
from umbel.client import Client, TrainResult

class Patient(Client):
    def __init__(self):
        self.model, self.sample_count = torch.nn.Linear(2, 1), 3

    def train(self, model, plan):
        open("training", "w").close()
        while "SLOW" in os.environ and not plan.should_stop():
            time.sleep(0.02)
        return TrainResult(3, 1 if "SLOW" in os.environ else 2, 2)
"""
PATIENT_RUN = """
name = "patience"
rounds = { count = 1, target = 1, over_selection = 1.0, window_s = 600 }
"""


@dataclass
class Coordinator:
    url: str
    admin_key: str

    def operator(self) -> Operator:
        return Operator(self.url, self.admin_key)


def start(command: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> "subprocess.Popen[str]":
    """A verb of the command line as its own process. `command`: `module.function`, as `umbel` mounts it.

    One thread each: on a machine with few cores, OpenMP threads of many processes spin waiting for each other.
    """
    module, _, function = command.rpartition(".")
    code = f"import typer; from {module} import {function} as verb; "
    code += "typer.run(verb) if not isinstance(verb, typer.Typer) else verb()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(process: "subprocess.Popen[str]", status: int = 0) -> str:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status, err
    return out


def fails(process: "subprocess.Popen[str]", status: int = 1) -> str:
    """What it said of why, when it ended with this exit status."""
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status, err
    return err


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    data = tmp_path / "coordinator"
    process = start("umbel.server.serve.commands.serve", "--data", str(data), "--port", "0", "--log-level", "warning")
    try:
        wait_for_file(data / "endpoint", process)
        yield Coordinator((data / "endpoint").read_text().strip(), (data / "admin.key").read_text().strip())
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def umbel(coordinator: Coordinator, group: str, *arguments: str) -> Any:
    process = start(
        f"umbel.client.cli.{group}",
        *arguments,
        "--json",
        UMBEL_SERVER=coordinator.url,
        UMBEL_ADMIN_KEY=coordinator.admin_key,
    )
    return json.loads(ends(process))


def join(
    coordinator: Coordinator, state: Path, run: str, app: str, cwd: Path = ROOT, **more: str
) -> "subprocess.Popen[str]":
    with coordinator.operator() as operator:
        (token,) = operator.create_tokens()
    arguments = ["--server", coordinator.url, "--app", app, "--run", run, "--state", str(state), "--json"]
    arguments += ["--name", state.name, "--label", "tier=ward", "--label", f"side={state.name}"]
    return start("umbel.client.cli.site.join", *arguments, cwd=cwd, UMBEL_TOKEN=token, **more)


@pytest.mark.nightly
def test_a_token_made_for_a_site_lets_in_that_site_alone(coordinator: Coordinator, tmp_path: Path) -> None:
    [token] = umbel(coordinator, "clients.token_app", "create", "--name", "ward", "--label", "tier=gold")["tokens"]
    again = ["create", "--name", "ward", "--count", "2", "--server", coordinator.url]
    refused = start("umbel.client.cli.clients.token_app", *again, UMBEL_ADMIN_KEY=coordinator.admin_key)
    assert "make one token for each name" in fails(refused)
    where = ["--server", coordinator.url, "--app", "examples.my_hospital:client", "--run", "absent"]
    for name, sentence, status in (("other", "this token is for 'ward'", 77), ("ward", "unknown-run", 1)):
        who = ["--name", name, "--state", str(tmp_path / "state"), "--label", "side=north"]
        assert sentence in fails(start("umbel.client.cli.site.join", *where, *who, UMBEL_TOKEN=token), status)
    [ward] = umbel(coordinator, "clients.client_app", "list")
    assert (ward["id"], ward["is_name_bound"], ward["bound_labels"]) == ("ward", True, {"tier": "gold"})
    assert ward["labels"] == {"tier": "gold", "side": "north"}


@pytest.mark.nightly
def test_four_hospitals_train_one_model_to_the_end(coordinator: Coordinator, tmp_path: Path) -> None:
    app, init = "examples.my_hospital:client", tmp_path / "init.safetensors"
    ends(start("umbel.client.cli.models.model_app", "init", "--app", app, "--out", str(init)))
    umbel(coordinator, "runs.run_app", "create", "examples/breast_cancer.toml", "--model", str(init))
    hospitals = [
        join(coordinator, tmp_path / "north", "breast-cancer", app, HOSPITAL="0"),
        join(coordinator, tmp_path / "south", "breast-cancer", "examples.own_training:client", HOSPITAL="1"),
        join(coordinator, tmp_path / "east", "breast-cancer", app, HOSPITAL="2"),
        join(coordinator, tmp_path / "west", "breast-cancer", app, HOSPITAL="3"),
    ]
    farewells = [json.loads(ends(hospital)) for hospital in hospitals]
    assert {end["status"] for end in farewells} == {"finished"}
    with coordinator.operator() as operator:
        labels = {client.id: client.labels for client in operator.clients()}
    assert labels == {name: {"tier": "ward", "side": name} for name in ("north", "south", "east", "west")}
    progress = umbel(coordinator, "runs.run_app", "show", "breast-cancer")
    committed = [record for record in progress["ended"] if record["committed"]]
    assert [record["task"] for record in committed] == [*["training"] * 10, "evaluation"], "the last model, too"
    assert min(record["reported"] for record in committed) >= 3
    assert sum(record["reported"] for record in committed) == sum(end["accepted"] for end in farewells)
    assert committed[-1]["evaluation"]["accuracy"] > 0.9
    out = tmp_path / "final.safetensors"
    newest = umbel(coordinator, "runs.run_app", "export", "breast-cancer", "--out", str(out))
    assert newest["version"] == 10
    assert load_file(out).keys() == load_file(init).keys()
    (listed,) = umbel(coordinator, "runs.run_app", "list")
    assert listed["status"] == "finished"
    watch = ["watch", "breast-cancer", "--server", coordinator.url]
    picture = ends(start("umbel.client.cli.runs.run_app", *watch, UMBEL_ADMIN_KEY=coordinator.admin_key))
    assert "10 of 10 rounds" in picture
    lines = ends(start("umbel.client.cli.runs.run_app", *watch, "--json", UMBEL_ADMIN_KEY=coordinator.admin_key))
    assert [json.loads(line)["round"] for line in lines.splitlines()] == [*range(1, 11), 10]


@pytest.mark.nightly
def test_a_doctor_finds_a_coordinator_that_is_well_and_a_client_that_was_removed(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    where = ["--server", coordinator.url, "--state", str(tmp_path), "--json"]
    home = Home(tmp_path, coordinator.url)
    with coordinator.operator() as operator, connect(coordinator.url) as replicas:
        (token,) = operator.create_tokens()
        identity = identify(home, "ward", token)
        ensure_enrolled(CoordinatorClient(Transport(replicas, identity.authorize)), home, identity, token, {})
        found = json.loads(ends(start("umbel.client.cli.check.doctor", *where)))["findings"]
        verdicts = {one["check"]: one["verdict"] for one in found}
        assert (verdicts["coordinator"], verdicts["clock"], verdicts["enrolment"]) == ("pass", "pass", "pass")
        operator.remove_client("ward")
        found = json.loads(ends(start("umbel.client.cli.check.doctor", *where), status=1))["findings"]
        (refused,) = [one for one in found if one["verdict"] == "wrong"]
        assert refused["check"] == "enrolment"
        assert "the coordinator's operator has removed this client" in refused["found"]


def patient_run(coordinator: Coordinator, site: Path) -> None:
    site.mkdir()
    (site / "patient.py").write_text(PATIENT_APP)
    (site / "run.toml").write_text(PATIENT_RUN)
    app = ["--app", "patient:Patient", "--out", "init.safetensors"]
    ends(start("umbel.client.cli.models.model_app", "init", *app, cwd=site))
    umbel(coordinator, "runs.run_app", "create", str(site / "run.toml"), "--model", str(site / "init.safetensors"))


def test_a_client_killed_in_training_gets_its_assignment_again(coordinator: Coordinator, tmp_path: Path) -> None:
    site = tmp_path / "site"
    patient_run(coordinator, site)
    first = join(coordinator, tmp_path / "ward", "patience", "patient:Patient", cwd=site, SLOW="1")
    wait_for_file(site / "training", first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    end = json.loads(ends(join(coordinator, tmp_path / "ward", "patience", "patient:Patient", cwd=site)))
    assert (end["status"], end["accepted"]) == ("finished", 1)
    with coordinator.operator() as operator:
        (record,) = operator.progress("patience").ended
    assert (record.round, record.attempt, record.reported) == (1, 1, 1)


def test_a_client_told_to_leave_sends_its_partial_work(coordinator: Coordinator, tmp_path: Path) -> None:
    site = tmp_path / "site"
    patient_run(coordinator, site)
    ward = join(coordinator, tmp_path / "ward", "patience", "patient:Patient", cwd=site, SLOW="1")
    wait_for_file(site / "training", ward)
    ward.send_signal(signal.SIGTERM)
    end = json.loads(ends(ward))
    assert (end["status"], end["accepted"]) == ("interrupted", 1)
    with coordinator.operator() as operator:
        ended = wait_until("an attempt that has ended", lambda: operator.progress("patience").ended)
    assert ended[0].clients[0].fate is Fate.PARTIAL


@pytest.mark.nightly
def test_stopping_a_run_sends_its_clients_home(coordinator: Coordinator, tmp_path: Path) -> None:
    site = tmp_path / "site"
    patient_run(coordinator, site)
    ward = join(coordinator, tmp_path / "ward", "patience", "patient:Patient", cwd=site, SLOW="1")
    wait_for_file(site / "training", ward)
    with coordinator.operator() as operator:
        assert operator.stop_run("patience", "enough seen").status is RunStatus.STOPPED
    end = json.loads(ends(ward))
    assert (end["status"], end["accepted"]) == ("stopped", 0)
    assert "enough seen" in end["reason"]


class LosesEachFirstAnswer(httpx.BaseTransport):
    """A line that carries every request, and loses the first answer of each kind."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self.seen = Counter[str]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        kind = kind_of(request)
        self.seen[kind] += 1
        if self.seen[kind] == 1:
            response.read()
            response.close()
            raise httpx.ReadError("the line was cut", request=request)
        return response

    def close(self) -> None:
        self._inner.close()


class Large(Client):
    """A model whose update takes more than one chunk, however fast the line is."""

    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(CHUNK_BYTES_MAX // 4, 1), 3  # and its bias

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        return TrainResult(3, 1, 1)


def test_a_lost_answer_at_every_step_leaves_one_counted_report(coordinator: Coordinator, tmp_path: Path) -> None:
    app, line = Large(), LosesEachFirstAnswer()
    with coordinator.operator() as operator:
        sha256 = operator.upload_model(encode_model(app.model.state_dict()))
        operator.create_run("patience", PATIENT_RUN, sha256)
        (token,) = operator.create_tokens()
        end = run_client(app, coordinator.url, tmp_path / "ward", "patience", token, "ward", transport=line)
        progress = operator.progress("patience")
    assert (end.status, end.accepted) == ("finished", 1)
    assert [record.reported for record in progress.ended] == [1]
    uploads = {"POST update", "HEAD update", "PATCH update"}
    assert set(line.seen) == {"POST enrolments", "POST check-ins", "GET models", "PUT report"} | uploads
