"""A canary with real clients over HTTP: it widens where all are fit, and says of each site why where they are not."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.contracts.house import House
from tests.servers.waits import LIMIT_S
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import Fate, RunProgress
from umbel.client import Client, ClientError, LocalPlan, TorchClient, TrainResult, run_client
from umbel.client.operator.audit import download

pytestmark = pytest.mark.slow
RUN = """
name = "long"
rounds = {{ count = 1, target = {target}, over_selection = 1.0, window_s = {window_s} }}
training = {{ local_steps = 200, batch_size = 4, learning_rate = 0.01 }}
aggregation = {{ sample_count_max = 1000 }}
canary = {{ clients = {target}, minimum = {minimum}, share = 0.02, on_failure = "stop" }}
"""


class Ready(TorchClient):
    """A site of the ready trainer; counts its steps."""

    def __init__(self) -> None:
        data = TensorDataset(torch.ones(64, 2), torch.ones(64, 1))
        super().__init__(nn.Linear(2, 1), nn.functional.mse_loss, data, device="cpu")
        self.steps: list[tuple[int, int]] = []

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        result = super().train(model, plan)
        self.steps.append((result.steps_done, result.steps_planned))
        return result


class Own(Client):
    """A site with a training loop of its own, of which `step` is one step."""

    def __init__(self, sample_count: int = 8, width: int = 2) -> None:
        self.model, self.sample_count = nn.Linear(width, 1), sample_count

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        planned, done = plan.steps_for(2), 0
        while done < planned and not (done and plan.should_stop()):
            self.step(model)
            done += 1
        return TrainResult(self.sample_count, done, planned, {"loss": self.loss()})

    def step(self, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("bias").add_(0.001)

    def loss(self) -> float:
        return 0.5


class Slow(Own):
    def step(self, model: nn.Module) -> None:
        time.sleep(0.3)


class Broken(Own):
    """Its data hold a NaN."""

    def step(self, model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("bias").fill_(float("nan"))


class NoLoss(Own):
    def loss(self) -> float:
        return float("nan")


def begin(house: House, target: int, minimum: int, window_s: float) -> None:
    state = {name: torch.zeros_like(value) for name, value in nn.Linear(2, 1).state_dict().items()}
    with house.operator() as operator:
        sha256 = operator.upload_model(encode_model(state))
        operator.create_run("long", RUN.format(target=target, minimum=minimum, window_s=window_s), sha256)


def take_part(house: House, directory: Path, sites: dict[str, Client]) -> dict[str, str]:
    """Every site to its end: how the run ended, or why the site left it."""
    ends: dict[str, str] = {}

    def work(name: str, token: str) -> None:
        try:
            ends[name] = run_client(sites[name], house.url, directory / name, "long", token, name).status
        except ClientError as error:
            ends[name] = str(error)

    with house.operator() as operator:
        tokens = operator.create_tokens(len(sites))
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in zip(sites, tokens, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return ends


def progress(house: House) -> RunProgress:
    with house.operator() as operator:
        return operator.progress("long")


def test_where_all_sites_are_fit_the_canary_widens(house: House, tmp_path: Path) -> None:
    begin(house, target=3, minimum=3, window_s=60)
    sites: dict[str, Client] = {"a": Ready(), "b": Ready(), "c": Own()}
    ends = take_part(house, tmp_path, sites)
    assert set(ends.values()) == {"finished"}, progress(house).run.reason
    for site in (sites["a"], sites["b"]):
        assert isinstance(site, Ready)
        assert site.steps == [(4, 4), (200, 200)]
    canary, first = progress(house).ended
    assert (canary.task, canary.committed, canary.reason) == (Task.CANARY, True, "3 of 3 clients pass the canary")
    assert (first.task, first.committed, first.model_version) == (Task.TRAINING, True, 1)
    words = {one.client: one.reason for one in canary.clients}
    for name in "abc":
        assert "s a step x 200 steps + " in words[name]
        assert "B/s + " in words[name], "both ways were measured"
        assert "largest change 0.0" in words[name]
        assert "peak memory " in words[name]
    assert "; loss 1" in words["a"]
    assert "; loss 0.5;" in words["c"]
    shown = house.umbel("show", "long")
    assert "a passes: a whole round takes " in shown.stdout.replace("\n", " ")


def test_a_canary_below_its_minimum_stops_the_run_with_every_sites_cause(house: House, tmp_path: Path) -> None:
    begin(house, target=5, minimum=5, window_s=40)
    sites: dict[str, Client] = {
        "fit": Ready(),
        "slow": Slow(),
        "broken": Broken(),
        "noloss": NoLoss(),
        "greedy": Own(sample_count=2000),
        "other": Own(width=3),
    }
    ends = take_part(house, tmp_path, sites)
    assert "this client's model does not fit the run's" in ends["other"]
    assert {ends[name] for name in ("fit", "slow", "noloss")} == {"failed"}
    found = progress(house)
    [canary] = found.ended
    fates = {one.client: (one.fate, one.reason) for one in canary.clients}
    assert fates["fit"][0] is Fate.ACCEPTED
    assert fates["slow"][0] is fates["noloss"][0] is Fate.UNFIT
    assert fates["slow"][1].startswith("window_s of at least ")
    assert "needed, not 40: 0.3" in fates["slow"][1]
    assert fates["noloss"][1].startswith("the training loss is not finite")
    assert fates["broken"][0] is fates["greedy"][0] is Fate.DECLINED
    assert "the update is not finite" in fates["broken"][1]
    assert "2000 samples, but the run accepts at most 1000" in fates["greedy"][1]
    assert [(one.client, "has shape" in one.reason or "fit" in one.reason) for one in found.turned_away] == [
        ("other", True)
    ]
    assert found.run.status is RunStatus.FAILED
    for name in ("broken", "greedy", "noloss", "slow"):
        assert f"{name}: " in found.run.reason
    watched = house.umbel("watch", "long")
    assert watched.exit_code == 1
    told = watched.stdout.replace("\n", " ")
    for words in ("the canary has failed: 1 of 5 clients passes", "slow unfit: window_s", "other turned away: "):
        assert words in told
    with house.operator() as operator:
        *_, last = download(operator, "long")
    text = json.dumps(last.bundle)
    assert "window_s of at least " in text
    assert "the training loss is not finite" in text
    checked = house.umbel("audit", "long", "--out", str(tmp_path / "audit.jsonl"))
    assert checked.exit_code == 0, checked.output
