"""How long a person waits for the first round of an experiment, from the command to its row on disk."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from umbel.sim.bench.report import BenchRow, Hold
from umbel.sim.bench.simulate.peers import Best
from umbel.sim.experiment.checkpoint import ROWS_FILE
from umbel.sim.simulation import RUNS_FOLDER

_START_S_MAX = 3.0  # beyond importing torch
_WHAT = "start to first round"
_PATIENCE_S, _LOOK_S = 120.0, 0.005
_EXPERIMENT = """
name = "start"
seeds = [0]
[data]
name = "digits"
[partition]
scheme = "dirichlet"
clients = 100
alpha = 0.3
[model]
name = "mlp"
hidden = [64]
[rounds]
count = 1000
target = 10
[training]
local_epochs = 5
batch_size = 10
learning_rate = 0.05
"""


def start_rows(peers: Sequence[Best]) -> list[BenchRow]:
    """Of 100 clients, of whom ten are asked. Promised: beyond what importing torch alone takes, in the same minute.

    `peers`: what they take for as many, their imports, and Ray, included, and the data made before.
    """
    torch_s = _importing_torch_s()
    start_s = _first_round_s()
    beyond = BenchRow(
        f"{_WHAT}, beyond importing torch",
        1e3 * (start_s - torch_s),
        "importing torch",
        1e3 * torch_s,
        "ms",
        Hold(1e3 * _START_S_MAX, of="ours"),
    )
    return [beyond, *(BenchRow(_WHAT, 1e3 * start_s, one.title, 1e3 * one.times.start_s, "ms") for one in peers)]


def _importing_torch_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def _first_round_s() -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "start.toml").write_text(_EXPERIMENT)
        command = [sys.executable, "-m", "umbel", "simulate", str(folder / "start.toml"), "--out", str(folder / "out")]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not _has_row(folder / "out"):
                if process.poll() is not None or time.perf_counter() - began > _PATIENCE_S:
                    raise RuntimeError(f"no round was simulated: {' '.join(command)}")
                time.sleep(_LOOK_S)
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()


def _has_row(out: Path) -> bool:
    return any(path.stat().st_size for path in out.glob(f"{RUNS_FOLDER}/*/{ROWS_FILE}"))
