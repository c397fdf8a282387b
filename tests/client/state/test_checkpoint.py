"""A training that is killed goes on from its checkpoint, and ends in the same bits."""

import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.client.doubles.double import TOKEN, Double
from tests.client.doubles.double_server import served
from tests.repository import ROOT
from tests.servers.waits import LIMIT_S
from umbel.aggregation.plans.training import TrainingSection
from umbel.client import LocalPlan, TorchClient, TrainResult
from umbel.client.local.large_batch import Lamb, Lars
from umbel.client.local.muon import MuonAndAdamW
from umbel.client.state.checkpoint import DiskCheckpoint

DTYPES = [torch.bfloat16, torch.int64, torch.bool, torch.uint8]


class Killed(BaseException):
    """Stands for kill -9."""


class KilledAtSave(DiskCheckpoint):
    """Saves after every step, and dies after so many."""

    def __init__(self, path: Path, n_saves: int) -> None:
        super().__init__(path, {"assignment": "demo.1.1.ward", "model_sha256": "0" * 64})
        self.left = n_saves

    def is_due(self) -> bool:
        return True

    def save(self, state: Mapping[str, object]) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1
        super().save(state)


def kept_at(path: Path, assignment: str = "demo.1.1.ward", model: str = "0" * 64) -> DiskCheckpoint:
    return DiskCheckpoint(path, {"assignment": assignment, "model_sha256": model})


class Augmented(Dataset[Any]):
    """Noise from every generator that a site's code may use."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(4)
        return torch.full((4,), float(index)) / 23 + noise, torch.tensor(index % 3)


def plain() -> TensorDataset:
    rng = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(42, 4, generator=rng), torch.randint(3, (42,), generator=rng))


DATA: "dict[str, Callable[[], Dataset[Any] | DataLoader[Any]]]" = {
    "tensors": plain,
    "augmented": Augmented,
    "loader": lambda: DataLoader(plain(), 8, shuffle=True),
    "own generator": lambda: DataLoader(plain(), 8, shuffle=True, generator=torch.Generator()),
    "augmented loader": lambda: DataLoader(Augmented(), 8, shuffle=True),
}
OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr, amsgrad=True),
    "rprop": lambda p, lr: torch.optim.Rprop(p, lr),
    "lars": Lars,
    "lamb": Lamb,
    "muon": lambda p, lr: MuonAndAdamW(
        [one for one in p if one.ndim == 2], [one for one in p if one.ndim < 2], lr, 0.1
    ),
}


def site(data: str = "tensors", optimizer: str = "adamw", width: int = 8) -> TorchClient:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 3))
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    return TorchClient(model, nn.CrossEntropyLoss(), DATA[data](), optimizer=OPTIMIZERS[optimizer], device="cpu")


def trained(client: TorchClient, checkpoint: DiskCheckpoint | None = None) -> tuple[TrainResult, list[Tensor]]:
    plan = LocalPlan(epochs=3, batch_size=8, seed=3, proximal_mu=0.1)
    if checkpoint is not None:
        plan = LocalPlan(epochs=3, batch_size=8, seed=3, proximal_mu=0.1, checkpoint=checkpoint)
    return client.train(client.model, plan), list(client.model.state_dict().values())


# Three batches make a pass over the augmented data, six over the others.
CASES = [(data, "adamw", n_saves) for data in DATA for n_saves in (1, 3, 7)]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "optimizer", "n_saves"), [*CASES, *(("tensors", name, 4) for name in OPTIMIZERS)])
def test_a_killed_training_ends_in_the_same_bits(tmp_path: Path, data: str, optimizer: str, n_saves: int) -> None:
    path = tmp_path / "training" / "checkpoint.safetensors"
    undisturbed, weights = trained(site(data, optimizer))
    with pytest.raises(Killed):
        trained(site(data, optimizer), KilledAtSave(path, n_saves))
    random.seed(99)
    torch.manual_seed(99)
    result, resumed = trained(site(data, optimizer), kept_at(path))
    assert result == undisturbed
    assert all(torch.equal(*pair) for pair in zip(weights, resumed, strict=True))


@pytest.mark.parametrize("other", [{"assignment": "demo.2.1.ward"}, {"model": "1" * 64}])
def test_a_checkpoint_of_other_work_is_removed(tmp_path: Path, other: dict[str, str]) -> None:
    path = tmp_path / "checkpoint.safetensors"
    kept_at(path).save({"step": 1})
    assert kept_at(path).load() == {"step": 1}
    assert kept_at(path, **other).load() is None
    assert not path.exists()


def test_a_damaged_checkpoint_is_removed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "checkpoint.safetensors"
    kept_at(path).save({"weights": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:-100])
    assert kept_at(path).load() is None
    assert "training starts from the beginning" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize("change", [{"width": 9}, {"optimizer": "sgd"}])
def test_a_checkpoint_of_other_code_is_left_aside(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Killed):
        trained(site(), KilledAtSave(path, 2))
    result, weights = trained(site(**change), kept_at(path))
    undisturbed, expected = trained(site(**change))
    assert "does not fit" in caplog.text
    assert result == undisturbed
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))


def test_whatever_state_is_made_of_comes_back(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    state = {
        "tied": [tied, tied.view(2, 3)],
        "none": None,
        "numbers": (1, True, 0.1, float("inf"), np.float32(0.5)),
        "nested": {3: {"betas": (0.9, 0.999)}, "text": "x"},
        "turned": tied.t(),
        "empty": torch.zeros(0),
        "dtypes": [torch.ones(2, dtype=dtype) for dtype in DTYPES],
    }
    path = tmp_path / "checkpoint.safetensors"
    kept_at(path).save(state)
    found = kept_at(path).load()
    assert found is not None
    assert found["numbers"] == state["numbers"]
    assert found["nested"] == state["nested"]
    assert found["none"] is None
    assert found["tied"][0].data_ptr() == found["tied"][1].data_ptr()
    assert torch.equal(found["turned"], tied.t())
    assert [tensor.dtype for tensor in found["dtypes"]] == DTYPES
    found["tied"][0].add_(1)  # memory, not the file
    again = kept_at(path).load()
    assert again is not None
    assert torch.equal(again["tied"][0], tied)


def test_a_disk_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "training").write_text("a file where a folder should be")
    checkpoint = kept_at(tmp_path / "training" / "checkpoint.safetensors")
    before_s = checkpoint.interval_s
    for _ in range(3):
        checkpoint.save({"weights": torch.ones(3)})
    assert len([message for message in caplog.messages if "could not be saved" in message]) == 1
    assert checkpoint.interval_s > before_s


def test_what_cannot_be_kept_is_said_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept_at(tmp_path / "checkpoint.safetensors").save({"schedule": object()})
    assert "a object cannot be kept" in caplog.text
    assert not list(tmp_path.iterdir())


def test_saving_takes_at_most_a_fortieth_of_the_time(tmp_path: Path) -> None:
    now, in_saving, n_saves = 0.0, 0.0, 0

    class Clock(DiskCheckpoint):
        def _write(self, state: Mapping[str, object]) -> None:
            nonlocal now, in_saving, n_saves
            cost_s = (2.0, 0.3, 5.0, 1.0)[n_saves % 4]
            now, in_saving, n_saves = now + cost_s, in_saving + cost_s, n_saves + 1

    checkpoint = Clock(tmp_path / "x", {"assignment": "a"}, 10**8, clock=lambda: now)
    while now < 10_000:
        now += 0.5  # a step
        if checkpoint.is_due():
            checkpoint.save({})
    assert n_saves > 50
    assert in_saving / now < 0.03


# --- a real process, really killed ---

APP = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from umbel.client import TorchClient
import umbel.client.state.checkpoint as checkpoint

checkpoint._LEAST_S = 0.002  # a step here is far shorter than one of a real training
write, steps_left = checkpoint.DiskCheckpoint._write, []

def note(self, state):
    write(self, state)
    steps_left[:] = steps_left or [1, 2, 3]

checkpoint.DiskCheckpoint._write = note

class Slow(nn.Sequential):
    def forward(self, x):
        time.sleep(0.01)
        if "DIES" in os.environ and steps_left and steps_left.pop() == 1:  # some steps after its first checkpoint
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

def client():
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(400, 4, generator=rng), torch.randint(3, (400,), generator=rng))
    torch.manual_seed(1)
    model = Slow(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    return TorchClient(model, nn.CrossEntropyLoss(), data, optimizer=torch.optim.Adam, device="cpu")
"""
JOIN = "import typer; from umbel.client.cli.site import join; typer.run(join)"


def ends(folder: Path, url: str, state: str, **environment: str) -> int:
    """The exit status of a client that takes part until it is killed or the run is over."""
    arguments = ["--server", url, "--app", "slow_site:client", "--run", "demo", "--name", "ward-7", "--state", state]
    with (folder / "log").open("a") as log:
        return subprocess.run(
            [sys.executable, "-c", JOIN, *arguments],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "UMBEL_TOKEN": TOKEN,
                **environment,
            },
            stdout=log,
            stderr=log,
            timeout=LIMIT_S,
            check=False,
        ).returncode


def update_sha256(folder: Path, kills: int) -> str:
    """What one round's report says, of a client that is killed so often while it trains."""
    folder.mkdir()
    (folder / "slow_site.py").write_text(APP)
    sys.path.insert(0, str(folder))
    try:
        model = __import__("slow_site").client().model
    finally:
        sys.path.remove(str(folder))
        del sys.modules["slow_site"]
    double = Double(model, training=TrainingSection(local_epochs=8, batch_size=16))
    with served(double.handle) as url:
        for _ in range(kills):
            assert ends(folder, url, "state", DIES="1") == -signal.SIGKILL, (folder / "log").read_text()
        assert ends(folder, url, "state") == 0, (folder / "log").read_text()
    assert not list(folder.glob("state/*/training/*"))
    return str(double.reports["demo.1.1.ward-7"]["update_sha256"])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_client_that_is_killed_in_mid_training_sends_the_same_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert update_sha256(tmp_path / "killed", kills=2) == update_sha256(tmp_path / "undisturbed", kills=0)
    log = (tmp_path / "killed" / "log").read_text()
    assert log.count("training resumes after step") == 2
