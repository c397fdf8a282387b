"""Runs a Flower app in one engine, in a process and a folder of its own, and reads what its rounds have noted."""

import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from umbel.sim.bench.flower import driver
from umbel.sim.bench.flower.workloads import CONFIG, TASK, AppWorkload
from umbel.sim.bench.peer_process import log_tail, started
from umbel.sim.bench.report import BenchFailed
from umbel.sim.engines.device import n_cores

_LIMIT_S = 600.0
_DRIVER_FILE = "driver.py"


@dataclass(frozen=True, slots=True)
class AppRun:
    """One run. `start_s`: from the start of the process to the end of the first round; `rounds_s`: of each later round.

    `accuracy`, `norm`: of the last model.
    """

    start_s: float
    rounds_s: tuple[float, ...]
    accuracy: float
    norm: float

    @property
    def settled_s(self) -> float:
        """Median seconds of a round in the last quarter, when caches are filled and all processes have started."""
        return statistics.median(self.rounds_s[3 * len(self.rounds_s) // 4 :])


def run_app_in(engine: str, python: Path, workload: AppWorkload, n_rounds: int, limit_s: float = _LIMIT_S) -> AppRun:
    """Run it with this interpreter. `engine`: of `driver.ENGINES`. Raises `BenchFailed`."""
    title = f"{workload.name} in {engine}"
    with tempfile.TemporaryDirectory(prefix="umbel-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job: driver.Job = {"engine": engine, "app": str(workload.write(folder)), "task": TASK, "config": CONFIG}
        job |= {"n_nodes": workload.n_nodes, "n_rounds": n_rounds, "n_cores": n_cores()}
        (folder / driver.JOB_FILE).write_text(json.dumps(job))
        (folder / _DRIVER_FILE).write_bytes(Path(driver.__file__).read_bytes())
        began = time.time()
        with started([str(python), _DRIVER_FILE, driver.JOB_FILE], folder) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired as error:
                raise BenchFailed(f"{title} had not finished after {limit_s:.0f} s{log_tail(folder)}") from error
        if process.returncode:
            raise BenchFailed(f"{title} ended with status {process.returncode}{log_tail(folder)}")
        notes = folder / driver.NOTES_FILE
        text = notes.read_text() if notes.exists() else ""
    return read_notes(text, began, title, n_rounds, workload.n_nodes)


def read_notes(text: str, began: float, title: str, n_rounds: int, n_nodes: int) -> AppRun:
    """Raises `BenchFailed` unless every round is noted once, and all nodes trained in it and half of them evaluated."""
    notes = [json.loads(line) for line in text.splitlines()]
    if [one["round"] for one in notes] != [*range(1, n_rounds + 1)]:
        raise BenchFailed(f"{title} has ended {len(notes)} rounds instead of {n_rounds}")
    for one in notes:
        found, wanted = (one["n_trained"], one["n_evaluated"]), (n_nodes, n_nodes // 2)
        if found != wanted:
            raise BenchFailed(
                f"in round {one['round']} of {title} {found[0]} nodes trained and {found[1]} evaluated, instead of "
                f"{wanted[0]} and {wanted[1]}"
            )
    ended = [one["ended_at"] for one in notes]
    rounds = tuple(later - earlier for earlier, later in pairwise(ended))
    return AppRun(ended[0] - began, rounds, notes[-1]["accuracy"], notes[-1]["norm"])
