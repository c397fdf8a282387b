"""Silos of several ranks in a real run over HTTP: the ranks of `torchrun` are one client."""

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.silo_of_ranks import network
from tests.contracts.house import House
from tests.contracts.test_client_and_coordinator import ends
from tests.repository import ROOT
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.client.training.shared_state import SharedState

pytestmark = pytest.mark.slow
HERE = "examples.silo_of_ranks"
PLAIN = """
name = "silos"
seed = 3
rounds = { count = 3, target = 3, minimum = 3, over_selection = 1.0, window_s = 300 }
training = { local_epochs = 2, batch_size = 16, learning_rate = 0.05, momentum = 0.9, evaluate = true }
"""


def started(house: House, folder: Path, number: int, app: str, n_ranks: int) -> "subprocess.Popen[str]":
    """A silo that takes part in the run, as its operator would start it."""
    with house.operator() as operator:
        (token,) = operator.create_tokens()
    name = f"silo-{number}"
    flags = {"--server": house.url, "--app": f"{HERE}:{app}", "--run": "silos", "--state": str(folder / name)}
    launch = "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks), "-m", "--"
    return subprocess.Popen(
        [sys.executable, "-m", *(launch if n_ranks > 1 else ()), "umbel", "join", "--name", name, "--json", *chain(*flags.items())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SILO": str(number), "UMBEL_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def begun(folder: Path, run_file: str) -> Generator[House]:
    """A coordinator with the run, which waits for its silos."""
    house = House(folder / "coordinator")
    try:
        torch.manual_seed(11)
        shared = SharedState(network())
        with house.operator() as operator:
            operator.create_run("silos", run_file, operator.upload_model(encode_model(shared.shared(), shared.layout)))
        yield house
    finally:
        house.stop()


def last_model(house: House, folder: Path) -> dict[str, Tensor]:
    with house.operator() as operator:
        assert operator.run("silos").status is RunStatus.FINISHED
        operator.download_model(operator.versions("silos")[-1].sha256, folder / "last.safetensors")
    return load_file(folder / "last.safetensors")


def model_of(silos: Sequence[tuple[str, int]], folder: Path, run_file: str) -> dict[str, Tensor]:
    with begun(folder, run_file) as house:
        for process in [started(house, folder, number, app, n) for number, (app, n) in enumerate(silos)]:
            ends(process)
        return last_model(house, folder)


def test_silos_of_shards_and_of_stages_make_the_model_of_plain_clients(tmp_path: Path) -> None:
    expected = model_of([("plain", 1)] * 3, tmp_path / "plain", PLAIN)
    found = model_of([("plain", 1), ("sharded", 2), ("staged", 2)], tmp_path / "silos", PLAIN)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
