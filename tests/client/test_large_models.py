"""A large model through the client: beside the model itself, memory stays where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.client.doubles.double import TOKEN, URL, Double
from tests.client.doubles.double_server import served
from tests.federations.whole_states import state_change
from tests.repository import ROOT
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import encode_model, metadata_of
from umbel.aggregation.model.layout import Layout
from umbel.client import Client, LocalPlan, TrainResult, run_client
from umbel.client.state.model_files import layout_in, write_model

EXTRA_MB_MAX = 64

# Anonymous memory is what a machine must have; pages mapped from a model's file are taken back when they are needed.
CHILD = """
import json, sys, threading, time
import torch
from umbel.client import Client, TrainResult, run_client

class Large(Client):
    def __init__(self, height):
        self.model, self.sample_count = torch.nn.Linear(1000, height, bias=False), 1

    def train(self, model, plan):
        with torch.no_grad():
            model.weight.add_(2.0**-10)
        return TrainResult(1, 1, 1)

def anonymous_mb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

url, token, run, height = *sys.argv[1:4], int(sys.argv[4])
app, peak_mb = Large(height), 0.0
before_mb = anonymous_mb()

def sample():
    global peak_mb
    while True:
        peak_mb = max(peak_mb, anonymous_mb())
        time.sleep(0.005)

threading.Thread(target=sample, daemon=True).start()
end = run_client(app, url, "state", run, token, "ward-7")
print(json.dumps({"before_mb": before_mb, "peak_mb": peak_mb, "accepted": end.accepted}))
"""


@pytest.mark.nightly
def test_a_large_model_is_in_memory_once(tmp_path: Path) -> None:
    height = 50_000  # 200 MB
    double = Double(nn.Linear(1000, height, bias=False), window_s=600)  # it is slow with so much
    with served(double.handle) as url:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, url, TOKEN, "demo", str(height)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert child.returncode == 0, child.stderr
    facts = json.loads(child.stdout)
    print(facts)
    assert facts["accepted"] == 1
    assert facts["before_mb"] > 190  # the model is there
    assert facts["peak_mb"] - facts["before_mb"] < EXTRA_MB_MAX


def test_a_model_file_is_written_as_it_is_encoded(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16(), tmp_path / "model.safetensors"
    layout = write_model(path, model.state_dict())
    assert path.read_bytes() == encode_model(model.state_dict())
    assert layout_in(path) == layout


def test_what_is_no_model_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"PK not a model")
    with pytest.raises(
        LayoutError, match=r"model\.safetensors is not a safetensors model, or is incomplete \("
    ) as refused:
        layout_in(path)
    assert str(refused.value).endswith(
        ": make a model with `umbel model init --app APP --out FILE`, or copy the file again"
    )
    write_model(path, nn.Linear(2, 1).state_dict())
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(LayoutError, match="or copy the file again"):
        layout_in(path)
    save_file({"weight": torch.zeros(3)}, path, metadata_of(Layout.of_state(nn.Linear(2, 1).state_dict())))
    with pytest.raises(LayoutError, match=r"model\.safetensors: the model file's layout does not describe"):
        layout_in(path)
    with pytest.raises(FileNotFoundError):
        layout_in(tmp_path / "missing")


class Mixed(Client):
    """Several pieces to a tensor, several dtypes, a counter, a tied tensor, and one that is not contiguous."""

    def __init__(self) -> None:
        rng, conv = torch.Generator().manual_seed(0), nn.Conv2d(300, 200, 3)
        tied = nn.Parameter(conv.weight.detach().contiguous(memory_format=torch.channels_last))
        conv.weight = tied
        others = (nn.Linear(7, 200, dtype=torch.bfloat16), nn.Linear(5, 5, dtype=torch.float64))
        self.model, self.sample_count = nn.Sequential(conv, nn.BatchNorm2d(200), *others), 1
        self.model.register_parameter("tied", tied)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng))
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        rng = torch.Generator().manual_seed(plan.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=rng))
            for name, value in model.named_buffers():
                value.add_(3 if name.endswith("tracked") else 0.25)
        return TrainResult(1, 1, 1)


def test_an_update_written_in_pieces_is_the_weight_change(tmp_path: Path) -> None:
    app = Mixed()
    double = Double(app.model)
    assert run_client(app, URL, tmp_path, "demo", TOKEN, transport=double.transport()).accepted == 1
    assert torch.equal(double.updates[0], state_change(double.layout, app.model.state_dict(), app.start))
