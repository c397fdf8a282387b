"""`umbel bench simulate`: local training, and whole simulated rounds, against a plain loop.

*Training* is an engine's work and a weighted sum of what comes of it, and theirs (`tight_loop.py`) likewise: what is
promised is of that. A *whole round* is everything beside: who waits, who is drawn, virtual time, updates on the grid,
the exact sum, the next model and its hash, the record of each client. Both sides train the same batches of the same
clients, and that they come to the same weights is asserted.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

from umbel.sim.bench import Hold, Report, Row
from umbel.sim.bench_simulate_scale import M_WORDS, scale_rows
from umbel.sim.bench_simulate_start import start_row
from umbel.sim.child_process import in_child
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.choose import AutoEngine, named_engine
from umbel.sim.engines.losses import LOSSES
from umbel.sim.engines.stacked import StackedEngine
from umbel.sim.engines.threads import one_thread
from umbel.sim.experiments.garbage import seldom_collected
from umbel.sim.simulate_timing import Timed, plain_loop_s, require_same_training, simulated, training_s, two_processes_s
from umbel.sim.simulate_workloads import Workload, workloads

_BY_HAND, _ANY = "linear chains", "any module"
_TWO_PROCESSES_MAX = 1.05
_AUTO_MAX = 1.1
_TURNS = 3
_MEMORY = Hold(600, of="ours")  # megabytes
_PROMISES = {("A", _BY_HAND): 5.0, ("A", _ANY): 3.0, ("C", _BY_HAND): 8.0, ("Cs", _BY_HAND): 30.0}


def measure(*, quick: bool, only: str | None = None) -> Report:
    """Run them all, or the one of that name. Raises `ValueError` for a name that none has."""
    parts: dict[str, Callable[[], list[Row]]] = {
        one.name: partial(_compare, one, one.rounds_quick if quick else one.rounds) for one in workloads()
    }
    parts["M"] = lambda: scale_rows(quick=quick)
    parts["start"] = lambda: [start_row()]
    if only is not None and only not in parts:
        raise ValueError(f"there is no workload {only}; there are {', '.join(parts)}")
    rows = [row for name, part in parts.items() if only in (None, name) for row in part()]
    notes = (
        "Milliseconds of a round, the median. The plain loop: one model, slices, torch.optim, one thread; of B in two",
        "processes. Training: an engine's work and the sum of it. A whole round has all else that a coordinator does.",
        *(f"{one.name}: {one.words}." for one in workloads() if only in (None, one.name)),
        *([f"M: {M_WORDS}."] if only in (None, "M") else ()),
    )
    return Report("simulate", tuple(rows), notes)


def _compare(workload: Workload, n_rounds: int) -> list[Row]:
    population = workload.population()
    with one_thread(), seldom_collected():
        if workload.name == "B":
            with closing(named_engine("auto", workload.recipe)) as engine:
                ours = simulated(workload, population, engine, n_rounds)
                require_same_training(workload, population, engine, ours.cohorts[0])
            theirs = two_processes_s(workload, population, ours)
            rows = [
                _row(workload, "auto, whole round", ours.seconds, theirs, _TWO_PROCESSES_MAX),
                _memory_row(workload),
            ]
            return [*rows, _auto_row(workload, population, ours)]
        rows, theirs = list[Row](), 0.0
        for how, by_hand in ((_BY_HAND, True), (_ANY, False)):
            engine = StackedEngine(workload.recipe.make(), LOSSES[workload.recipe.loss], by_hand=by_hand)
            ours = simulated(workload, population, engine, n_rounds)
            theirs = theirs or plain_loop_s(workload, population, ours)
            promise = _PROMISES.get((workload.name, how))
            training = training_s(workload, population, engine, ours.cohorts)
            rows.append(_row(workload, f"{how}, training", training, theirs, promise and 1 / promise))
            rows.append(_row(workload, f"{how}, whole round", ours.seconds, theirs, None))
        return [*rows, _auto_row(workload, population, ours)]


def _auto_row(workload: Workload, population: ShardedPopulation, ours: Timed) -> Row:
    """What the engine took by itself against the best that there is: they take turns, and the least time counts."""
    cohorts = ours.cohorts[:2]
    with closing(AutoEngine(workload.recipe)) as auto:
        training_s(workload, population, auto, cohorts[:1])
        chosen = auto.chosen
    seconds = dict.fromkeys(("batched", "threads", "processes", chosen), math.inf)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(closing(named_engine(name, workload.recipe))) for name in seconds}
        for _ in range(_TURNS):
            for name, engine in engines.items():
                seconds[name] = min(seconds[name], training_s(workload, population, engine, cohorts))
    best = min(seconds, key=seconds.__getitem__)
    return Row(
        f"{workload.name}: auto takes {chosen}, training",
        1e3 * seconds[chosen],
        f"the best of {', '.join(seconds)}: {best}",
        1e3 * seconds[best],
        "ms",
        Hold(_AUTO_MAX),
    )


def _memory_row(workload: Workload) -> Row:
    """Of a process that does nothing else, the engine's workers included: they are its threads."""
    idle, busy = in_child(_idle), in_child(_rounds_of, workload.name)
    what = f"{workload.name}: peak memory"
    return Row(what, busy.peak_bytes / 1e6, "torch and the simulator alone", idle.peak_bytes / 1e6, "MB", _MEMORY)


def _idle() -> None:
    """Imports what this module imports."""


def _rounds_of(name: str) -> None:
    workload = next(one for one in workloads() if one.name == name)
    with closing(named_engine("auto", workload.recipe)) as engine:
        simulated(workload, workload.population(), engine, 1)


def _row(workload: Workload, how: str, ours: float, theirs: float, bound: float | None) -> Row:
    against = "the plain loop, two processes" if workload.name == "B" else "the plain loop"
    promise = None if bound is None else Hold(round(bound, 4))
    return Row(f"{workload.name}: {how}", 1e3 * ours, against, 1e3 * theirs, "ms", promise)
