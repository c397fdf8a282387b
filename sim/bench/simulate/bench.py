"""`umbel bench simulate`: local training and whole simulated rounds against a plain loop, and the start of a run.

*Training* is an engine's work and the weighted sum of its changes; the plain loop (`timing.py`) does the same. The
promises are about this. A *whole round* adds the rest: who waits, the draw, virtual time, updates on the grid, the
exact sum, the next model and its hash, a record for each client. Both sides train the same batches of the same clients
and must come to the same weights. `peers.py` compares with Flower and pfl.
"""

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from umbel.sim.bench.measuring import in_child
from umbel.sim.bench.report import BenchRow, Hold, Report
from umbel.sim.bench.simulate.cohorts import cohort_rows
from umbel.sim.bench.simulate.own_clients import OWN_WORDS, own_clients_rows
from umbel.sim.bench.simulate.peers import TRAINING, BestSetup, Peers, find_peers, peer_rows
from umbel.sim.bench.simulate.scale import M_WORDS, scale_rows
from umbel.sim.bench.simulate.timing import (
    PlainLoop,
    do_nothing,
    plain_loop,
    require_same_training,
    rounds_of,
    simulated,
    training_s,
    two_processes,
)
from umbel.sim.bench.simulate.workloads import Workload, workloads
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.choose import AutoEngine, named_engine
from umbel.sim.engines.device import one_thread, require_device_name
from umbel.sim.engines.model import LOSSES
from umbel.sim.engines.stacked.stacked import StackedEngine
from umbel.sim.experiment.checkpoint import ROWS_FILE
from umbel.sim.experiment.trials import seldom_collected
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


def start_rows(peers: Sequence[BestSetup]) -> list[BenchRow]:
    """The start with 100 clients, of which ten are asked; the promise excludes the import of torch, measured at once.

    `peers`: the same for them, with imports and Ray, but with the data made before.
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


_BY_HAND, _ANY = "linear chains", "any module"
_WHOLE = "whole round"
_TWO_PROCESSES_MAX = 1.05
_AUTO_MAX = 1.1
_TURNS = 3
_MEMORY = Hold(600, of="ours")  # megabytes
_PROMISES = {("A", _BY_HAND): 5.0, ("A", _ANY): 3.0, ("C", _BY_HAND): 8.0, ("Cs", _BY_HAND): 30.0}


class NoSuchWorkload(ValueError):
    """No part has the requested name."""


def measure(
    *,
    quick: bool,
    only: str | None = None,
    peer_python: Path | None = None,
    device: str | None = None,
    plot: Path | None = None,
) -> Report:
    """Run all parts, or `only` one, also against the peers of `peer_python`.

    `device`: for cohorts of all sizes, drawn to `plot`; None: a GPU, if torch finds one. Raises `NoSuchWorkload`,
    `NoSuchDevice`, `EngineError` for a missing device, and `BenchFailed`.
    """
    device = device or ("cuda" if torch.cuda.is_available() else None)
    require_device_name(device or "cpu")
    peers = None if peer_python is None else find_peers(peer_python)
    parts: dict[str, Callable[[], list[BenchRow]]] = {
        one.name: partial(_compare, one, one.rounds_quick if quick else one.rounds, peers) for one in workloads()
    }
    parts["M"] = lambda: scale_rows(quick=quick)
    parts["clients"] = lambda: own_clients_rows(quick=quick)
    parts["start"] = lambda: start_rows([] if peers is None else peers.starts())
    parts["cohorts"] = lambda: cohort_rows(device or "cpu", quick=quick, plot=plot)
    if only is not None and only not in parts:
        raise NoSuchWorkload(f"there is no part {only}; choose one of {', '.join(parts)}")
    left_out = {"cohorts"} if device is None and plot is None else set[str]()
    wanted = [name for name in parts if name == only or (only is None and name not in left_out)]
    rows = [row for name in wanted for row in parts[name]()]
    notes = (
        "Milliseconds of a round, the median. The plain loop: one model, slices of data, torch.optim, one thread "
        "(for B: two processes).",
        "Training: the engine trains the clients, and their changes are added up. A whole round also has everything "
        "else that a coordinator does.",
        *(f"{one.name}: {one.words}." for one in workloads() if only in (None, one.name)),
        *([f"M: {M_WORDS}."] if only in (None, "M") else ()),
        *([f"{OWN_WORDS}."] if only in (None, "clients") else ()),
        *(
            ["Cohorts of all sizes are left out, because there is no GPU. --device cpu measures them on the CPU."]
            if left_out and not only
            else ()
        ),
        *([] if peers is None else peers.notes),
    )
    return Report("simulate", tuple(rows), notes)


@dataclass(frozen=True, slots=True)
class _Found:
    """`ours`: seconds of a round, by what it includes, for the comparison with peers."""

    rows: list[BenchRow]
    plain: PlainLoop
    ours: Mapping[str, float]


def _compare(workload: Workload, n_rounds: int, peers: Peers | None) -> list[BenchRow]:
    population = workload.population()
    with one_thread(), seldom_collected():
        found = (_large if workload.name == "B" else _small)(workload, population, n_rounds)
        theirs = [] if peers is None else peer_rows(peers, workload, population, found.plain, found.ours)
        return [*found.rows, *theirs, _auto_row(workload, population, found.plain.cohorts[:2])]


def _large(workload: Workload, population: ShardedPopulation, n_rounds: int) -> _Found:
    with closing(named_engine("auto", workload.recipe)) as engine:
        ours = simulated(workload, population, engine, n_rounds)
        require_same_training(workload, population, engine, ours.cohorts[0])
    plain, how = two_processes(workload, population, ours), f"auto, {_WHOLE}"
    rows = [_row(workload, how, ours.seconds, plain.seconds, _TWO_PROCESSES_MAX), _memory_row(workload)]
    return _Found(rows, plain, {how: ours.seconds})


def _small(workload: Workload, population: ShardedPopulation, n_rounds: int) -> _Found:
    rows, plain, of_chains = list[BenchRow](), None, dict[str, float]()
    for how, by_hand in ((_BY_HAND, True), (_ANY, False)):
        engine = StackedEngine(workload.recipe.make(), LOSSES[workload.recipe.loss], by_hand=by_hand)
        ours = simulated(workload, population, engine, n_rounds)
        plain = plain or plain_loop(workload, population, ours)
        training = training_s(workload, population, engine, ours.cohorts)
        promise = _PROMISES.get((workload.name, how))
        rows.append(_row(workload, f"{how}, {TRAINING}", training, plain.seconds, promise and 1 / promise))
        rows.append(_row(workload, f"{how}, {_WHOLE}", ours.seconds, plain.seconds, None))
        of_chains = of_chains or {f"{how}, {TRAINING}": training, f"{how}, {_WHOLE}": ours.seconds}
    assert plain is not None
    return _Found(rows, plain, of_chains)


def _auto_row(workload: Workload, population: ShardedPopulation, cohorts: tuple[Indices, ...]) -> BenchRow:
    """The engine that "auto" chose against the fastest one. They take turns; the least time counts."""
    with closing(AutoEngine(workload.recipe)) as auto:
        training_s(workload, population, auto, cohorts[:2])  # it may change its mind once
        chosen = auto.name
    seconds = dict.fromkeys(("batched", "threads", "processes", chosen), math.inf)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(closing(named_engine(name, workload.recipe))) for name in seconds}
        for _ in range(_TURNS):
            for name, engine in engines.items():
                seconds[name] = min(seconds[name], training_s(workload, population, engine, cohorts))
    best = min(seconds, key=seconds.__getitem__)
    return BenchRow(
        f"{workload.name}: auto takes {chosen}, training",
        1e3 * seconds[chosen],
        f"the best of {', '.join(seconds)}: {best}",
        1e3 * seconds[best],
        "ms",
        Hold(_AUTO_MAX),
    )


def _memory_row(workload: Workload) -> BenchRow:
    """The memory of a process that does nothing else, with the engine's worker threads."""
    idle, busy = in_child(do_nothing), in_child(rounds_of, workload.name)
    what = f"{workload.name}: peak memory"
    return BenchRow(what, busy.peak_bytes / 1e6, "torch and the simulator alone", idle.peak_bytes / 1e6, "MB", _MEMORY)


def _row(workload: Workload, how: str, ours: float, theirs: float, bound: float | None) -> BenchRow:
    against = "the plain loop, two processes" if workload.name == "B" else "the plain loop"
    promise = None if bound is None else Hold(round(bound, 4))
    return BenchRow(f"{workload.name}: {how}", 1e3 * ours, against, 1e3 * theirs, "ms", promise)
