"""A peer's job, and its run in an interpreter of its own: files in a folder, a time limit, and no process left behind.

The job names the data, the first weights, the cohorts and every batch.
"""

import statistics
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from umbel.sim.bench.peer_process import log_tail, started
from umbel.sim.bench.report import BenchFailed
from umbel.sim.bench.simulate import peer_work
from umbel.sim.bench.simulate.peer_work import write_work
from umbel.sim.bench.simulate.timing import seeds_of, steps_of
from umbel.sim.bench.simulate.workloads import Workload
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation

_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "padding"),
    nn.MaxPool2d: ("kernel_size",),
    nn.Flatten: (),
    nn.ReLU: (),
}


@dataclass(frozen=True, slots=True)
class PeerJob:
    """Rounds of a workload. `cohorts`: of equal size, by round; `weights`: the expected result of the last."""

    workload: Workload
    population: ShardedPopulation
    cohorts: tuple[Indices, ...]
    weights: Tensor

    @property
    def n_asked(self) -> int:
        return len(self.cohorts[0])

    def write(self, folder: Path, **words: Any) -> None:
        """Write it into a folder, for `peer_work.py`. `words`: further settings."""
        model, plan = self.workload.recipe.make(), self.workload.plan
        data = self.population.data_of(np.arange(self.population.n_clients))
        steps = [self._steps(number, cohort) for number, cohort in enumerate(self.cohorts, start=1)]
        turns = [turn for of_round in steps for turn in of_round]
        arrays = {
            "start": _vector(model).numpy(),
            "clients": np.stack(self.cohorts),
            "sizes": np.concatenate([data.sizes_of(cohort) for cohort in self.cohorts]),
            "inputs": data.samples.inputs.numpy(),
            "targets": data.samples.targets.numpy(),
            "rows": np.concatenate([step for turn in turns for step in turn]),
            "step_ends": np.cumsum([len(step) for turn in turns for step in turn]),
            "turn_ends": np.cumsum([len(turn) for turn in turns]),
        }
        known = {
            "layers": layers_of(model),
            "learning_rate": plan.learning_rate,
            "batch_size": plan.batch_size,
            "n_clients": self.population.n_clients,
        }
        write_work(folder, arrays, known | words)

    def apart(self, weights: Tensor) -> float:
        """The relative distance of a peer's weights from the expected ones; infinite for another shape."""
        if weights.shape != self.weights.shape:
            return float("inf")
        start = _vector(self.workload.recipe.make())
        return float((weights - self.weights).norm() / (self.weights - start).norm())

    def _steps(self, number: int, cohort: Indices) -> Sequence[Sequence[Indices]]:
        """The population's samples in each step of each turn of a round."""
        data, seeds = self.population.data_of(cohort), seeds_of(self.workload, cohort, number)
        turns = list[list[Indices]]()
        for seed, first, last in zip(seeds, data.starts, islice(data.starts, 1, None), strict=False):
            own = data.rows[first:last]
            turns.append([own[step.numpy()] for step in steps_of(seed, len(own), self.workload.plan)])
        return turns


def layers_of(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """A chain of layers: names in `torch.nn` and arguments. Raises `KeyError` for an unknown layer."""
    return [
        (type(layer).__name__, {name: getattr(layer, name) for name in _ARGUMENTS[type(layer)]})
        for layer in model.children()
    ]


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run a peer. `title`: which, with its versions; `words`: further settings for `program`.

    `torchrun`: number of processes of torch's launcher; 0: a plain process.
    """

    title: str
    file_name: str
    program: str
    words: dict[str, Any]
    torchrun: int = 0

    def command(self, python: Path, folder: Path) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.torchrun}"]
        return [str(python), *(launcher if self.torchrun else []), str(folder / self.file_name)]


@dataclass(frozen=True, slots=True)
class PeerTimes:
    """`start_s`: from the command to the end of the first round; `round_s`: the median of the others."""

    start_s: float
    round_s: float
    weights: Tensor


def run_peer(python: Path, setup: Setup, job: PeerJob, limit_s: float) -> PeerTimes:
    """Run the job. Raises `BenchFailed`."""
    with tempfile.TemporaryDirectory(prefix="umbel-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job.write(folder, **setup.words)
        (folder / setup.file_name).write_text(setup.program)
        (folder / "peer_work.py").write_bytes(Path(peer_work.__file__).read_bytes())
        began = time.time()
        with started(setup.command(python, folder), folder) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired as error:
                raise BenchFailed(f"{setup.title} had not finished after {limit_s:.0f} s{log_tail(folder)}") from error
        if not (folder / peer_work.REPORT_FILE).exists():
            raise BenchFailed(f"{setup.title} ended with status {process.returncode} and no result{log_tail(folder)}")
        return _read_report(folder, began, len(job.cohorts), setup.title)


def _read_report(folder: Path, began: float, n_rounds: int, title: str) -> PeerTimes:
    try:
        with np.load(folder / peer_work.REPORT_FILE) as arrays:
            times, weights = arrays["times"].tolist(), torch.from_numpy(arrays["weights"])
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BenchFailed(f"cannot read the report of {title}: {error}") from error
    if len(times) != n_rounds + 1:
        raise BenchFailed(f"{title} reports {len(times) - 1} rounds instead of {n_rounds}")
    rounds = [later - earlier for earlier, later in pairwise(times)]
    return PeerTimes(times[1] - began, statistics.median(rounds[1:] or rounds), weights)
