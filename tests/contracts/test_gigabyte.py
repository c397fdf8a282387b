"""A gigabyte through the whole path: a coordinator and two clients, each a process, and how much memory they take."""

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.repository import ROOT
from umbel.aggregation.optimizers.section import AggregationSection, ServerOptimizerName
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.sections import RoundsSection
from umbel.client import Operator
from umbel.client.state.model_files import write_model
from umbel.sim.demo.plan import run_toml
from umbel.sim.processes import start_coordinator, stopping

N_VALUES, N_CLIENTS = 250_000_000, 2
MODEL_MB = 4 * N_VALUES / 1e6
STEP = 2.0**-10
ADAMS_STEP = 0.01 * 0.1 * 2 * STEP / (math.sqrt(0.99e-6 + 0.01 * (2 * STEP) ** 2) + 1e-3)
DISK_BYTES_MIN = 24 << 30
"""The model and the next, each with its slots, an update of each client at both ends, its model; and a reserve."""
COORDINATOR_MODELS_MAX = 2.2
"""The sum has 64 bits for each of the model's 32, and nothing else is in memory whole."""
CLIENT_MODELS_MAX = 1.2
"""The application's own model; updates and downloads are on disk."""
LIBRARIES_MB = 400
PATIENCE_S = 300.0

CLIENT = """
import sys
import torch
from umbel.client import Client, TrainResult, run_client

class Gigabyte(Client):
    def __init__(self, n_values):
        self.model, self.sample_count = torch.nn.Module(), 1
        self.model.weight = torch.nn.Parameter(torch.zeros(n_values // 1000, 1000))

    def train(self, model, plan):
        with torch.no_grad():
            model.weight.add_(float(sys.argv[5]))
        return TrainResult(1, 1, 1)

url, token, name, n_values = sys.argv[1:5]
end = run_client(Gigabyte(int(n_values)), url, name, "gigabyte", token, name)
assert end.accepted == 1, end
"""


class Peaks:
    """The most memory that processes have had, in MB: `anonymous` is theirs alone, `resident` has mapped files too."""

    def __init__(self) -> None:
        self.anonymous: dict[str, float] = {}
        self.resident: dict[str, float] = {}
        self._done = threading.Event()

    @contextmanager
    def sampled(self, pids: Mapping[str, int]) -> Generator[None]:
        thread = threading.Thread(target=self._sample, args=(pids,))
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _sample(self, pids: Mapping[str, int]) -> None:
        while not self._done.wait(0.02):
            for name, pid in pids.items():
                with suppress(OSError, StopIteration):  # it has ended
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    self.anonymous[name] = max(self.anonymous.get(name, 0.0), _mb(lines, "RssAnon"))
                    self.resident[name] = max(self.resident.get(name, 0.0), _mb(lines, "VmRSS"))


def _mb(lines: Sequence[str], name: str) -> float:
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


@pytest.fixture
def folder(tmp_path: Path) -> Generator[Path]:
    """A directory with enough room, which is gone afterwards: pytest keeps those of the last runs."""
    if shutil.disk_usage(tmp_path).free < DISK_BYTES_MIN:
        pytest.skip(f"{DISK_BYTES_MIN >> 30} GiB of free disk are needed")
    yield tmp_path
    shutil.rmtree(tmp_path)


def client(folder: Path, url: str, token: str, number: int) -> "subprocess.Popen[bytes]":
    """A process that trains for one round: it adds 1 or 3 steps to each value."""
    arguments = [url, token, f"client-{number}", str(N_VALUES), str(STEP * (1 + 2 * number))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], cwd=folder, env=environment)


def begin(operator: Operator, folder: Path, optimizer: ServerOptimizerName) -> list[str]:
    """The run, from a model of zeros; a token for each client."""
    write_model(folder / "model", {"weight": torch.zeros(N_VALUES // 1000, 1000)})
    rounds = RoundsSection(1, N_CLIENTS, N_CLIENTS, over_selection=1.0, window_s=600.0)
    file = RunFile("gigabyte", rounds, aggregation=AggregationSection(optimizer=optimizer))
    operator.create_run("gigabyte", run_toml(file), operator.upload_model(folder / "model"))
    return operator.create_tokens(N_CLIENTS)


def ended(operator: Operator) -> RoundRecord:
    return next(seen.ended[0] for seen in operator.follow("gigabyte", wait_s=5.0) if seen.ended)


def wait_for(clients: Sequence["subprocess.Popen[bytes]"]) -> None:
    try:
        assert [process.wait(PATIENCE_S) for process in clients] == [0] * N_CLIENTS
    finally:
        for process in clients:
            process.kill()
            process.wait()


@pytest.mark.nightly
@pytest.mark.parametrize(("optimizer", "expected"), [("sgd", 2 * STEP), ("adam", ADAMS_STEP)])
def test_a_gigabyte_goes_round_in_twice_its_size_of_memory_whatever_the_number_of_clients(
    folder: Path, optimizer: ServerOptimizerName, expected: float
) -> None:
    """What a server optimizer remembers is on disk: two slots take no more memory."""
    peaks, started = Peaks(), time.monotonic()
    with stopping([]) as children:
        coordinator = start_coordinator(folder / "data")
        children.append(coordinator.child)
        with Operator(coordinator.url, coordinator.admin_key) as operator:
            tokens = begin(operator, folder, optimizer)
            clients = [client(folder, coordinator.url, token, i) for i, token in enumerate(tokens)]
            pids = {f"client-{i}": process.pid for i, process in enumerate(clients)}
            with peaks.sampled({"coordinator": coordinator.pid, **pids}):
                wait_for(clients)
                record = ended(operator)
    took_s = time.monotonic() - started
    print(f"{took_s:.0f} s; anonymous MB {peaks.anonymous}; resident MB {peaks.resident}")
    assert record.committed
    assert record.model_sha256 is not None
    with safe_open(folder / "data" / "blobs" / "models" / record.model_sha256, framework="pt") as file:
        weight = file.get_slice("weight")
        assert weight[:2].unique().tolist() == weight[-2:].unique().tolist() == [pytest.approx(expected, rel=1e-6)]
    assert peaks.anonymous["coordinator"] < COORDINATOR_MODELS_MAX * MODEL_MB + LIBRARIES_MB
    for name in pids:
        assert peaks.anonymous[name] < CLIENT_MODELS_MAX * MODEL_MB + LIBRARIES_MB
