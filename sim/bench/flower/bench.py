"""`umbel bench flower`: the same Flower app, unchanged, under umbel's simulator and under Flower's own engine.

Two figures of each: rounds per minute when the run has settled, and the time from the start of the process to the end
of the first round. A plain loop that calls the app's own functions is the physical limit of one core. The engines take
turns, each run in a process of its own, and all must have done the same work: `runs.py` counts the replies of each
round, and the last models must agree.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from umbel.client.errors import AppError
from umbel.client.flower.project import require_flower
from umbel.sim.bench.flower.runs import AppRun, run_app_in
from umbel.sim.bench.flower.workloads import AppWorkload, app_workloads
from umbel.sim.bench.peer_process import versions_of
from umbel.sim.bench.report import BenchFailed, BenchRow, Hold, Report
from umbel.sim.engines.device import n_cores

_FASTER, _SOONER = Hold(5.0, sense=">="), Hold(0.1)
_ACCURACY_APART, _NORM_APART = 0.15, 1e-3
_TURNS, _TURNS_QUICK = 3, 1
OURS, FLOWER, PLAIN = "umbel", "flower", "plain"
_PLAIN_TITLE = "plain loop, one process"
_PEER_PACKAGES = ("flwr", "ray", "torch", "scikit-learn")
NO_PEER = (
    "Flower's own engine was not measured: name an interpreter that has it with --peer-python. To make one: "
    'python -m venv peer && peer/bin/pip install "flwr[simulation]" torch scikit-learn.'
)


class NoSuchApp(ValueError):
    """No app of the benchmark has the requested name."""


@dataclass(frozen=True, slots=True)
class FlowerPeer:
    """An interpreter with Flower's simulation engine. `title`: its versions."""

    python: Path
    title: str


def find_flower(python: Path) -> FlowerPeer:
    """Raises `BenchFailed` if a package is missing there."""
    python = python.absolute()  # not resolved: in a virtual environment it is a link
    versions = versions_of(python, _PEER_PACKAGES)
    if missing := [name for name in _PEER_PACKAGES if name not in versions]:
        raise BenchFailed(
            f"{python} has no {', '.join(missing)}; install flwr[simulation], torch and scikit-learn there, or leave "
            "out --peer-python"
        )
    return FlowerPeer(python, f"Flower {versions['flwr']} on Ray {versions['ray']}, {n_cores()} actors")


Run = Callable[[str, AppWorkload, int], AppRun]


def measure(*, quick: bool, only: str | None = None, peer_python: Path | None = None) -> Report:
    """Run all apps, or `only` one. Raises `NoSuchApp` and `BenchFailed`."""
    apps = app_workloads()
    if only is not None and only not in (names := [one.name for one in apps]):
        raise NoSuchApp(f"there is no app {only}; choose one of {', '.join(names)}")
    try:
        require_flower()
    except AppError as error:
        raise BenchFailed(f"umbel bench flower simulates Flower apps in this interpreter: {error}") from error
    peer = None if peer_python is None else find_flower(peer_python)
    pythons = {OURS: Path(sys.executable), PLAIN: Path(sys.executable)}
    pythons |= {} if peer is None else {FLOWER: peer.python}

    def run(engine: str, workload: AppWorkload, n_rounds: int) -> AppRun:
        return run_app_in(engine, pythons[engine], workload, n_rounds)

    compared = [compare(one, pythons, run, quick=quick) for one in apps if only in (None, one.name)]
    title = None if peer is None else peer.title
    notes = (
        "Rounds per minute: 60 s over the median round of the last quarter of a run; first round: seconds from the "
        "start of the process to the end of the first round. The median of all runs; the engines take turns.",
        f"The {_PLAIN_TITLE}, calls the functions of the app that train and evaluate, and averages the models.",
        *([NO_PEER] if peer is None else []),
        *(f"{one.workload.name}: {one.workload.words}. {one.spread}" for one in compared),
    )
    return Report("flower", tuple(row for one in compared for row in rows_of(one, title)), notes)


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of one app, by engine."""

    workload: AppWorkload
    runs: Mapping[str, Sequence[AppRun]]

    def per_minute(self, engine: str) -> float:
        return statistics.median(60 / run.settled_s for run in self.runs[engine])

    def start_s(self, engine: str) -> float:
        return statistics.median(run.start_s for run in self.runs[engine])

    def accuracy(self, engine: str) -> float:
        return statistics.median(run.accuracy for run in self.runs[engine])

    @property
    def spread(self) -> str:
        """The least and the greatest figure of each engine, its fastest round of all, and its accuracy."""
        return " ".join(map(self._spread, self.runs))

    def _spread(self, engine: str) -> str:
        rates = [60 / run.settled_s for run in self.runs[engine]]
        starts = [run.start_s for run in self.runs[engine]]
        best = max(60 / min(run.rounds_s) for run in self.runs[engine])
        return (
            f"{engine}, {len(rates)} x: {min(rates):.3g} to {max(rates):.3g} rounds/min, the fastest round {best:.3g}, "
            f"first round after {min(starts):.3g} to {max(starts):.3g} s, accuracy {self.accuracy(engine):.0%}."
        )


def compare(workload: AppWorkload, engines: Iterable[str], run: Run, *, quick: bool) -> Compared:
    """Let the engines run the app in turn. Raises `BenchFailed` if their last models do not agree."""
    n_rounds, turns = (workload.rounds_quick, _TURNS_QUICK) if quick else (workload.rounds, _TURNS)
    runs: dict[str, list[AppRun]] = {engine: [] for engine in engines}
    for _ in range(turns):
        for engine, found in runs.items():
            found.append(run(engine, workload, n_rounds))
    compared = Compared(workload, runs)
    for engine in runs:
        _require_same_model(compared, engine)
    return compared


def _require_same_model(compared: Compared, engine: str) -> None:
    name, expected = compared.workload.name, compared.accuracy(PLAIN)
    if not abs((found := compared.accuracy(engine)) - expected) <= _ACCURACY_APART:
        raise BenchFailed(
            f"{name} in {engine} ends with an accuracy of {found:.1%}, and the plain loop with {expected:.1%}: chance "
            "does not explain that"
        )
    if not compared.workload.is_exact:
        return
    wanted = compared.runs[PLAIN][0].norm
    for run in compared.runs[engine]:
        if not abs(run.norm - wanted) <= _NORM_APART * wanted:
            raise BenchFailed(
                f"{name} in {engine} ends with another model than the plain loop: its norm is {run.norm:g} instead of "
                f"{wanted:g}"
            )


def rows_of(compared: Compared, title: str | None) -> list[BenchRow]:
    """`title`: of Flower's engine; None: not measured."""
    flowers = [] if title is None else _rows(compared, FLOWER, title, _FASTER, _SOONER)
    return [*flowers, *_rows(compared, PLAIN, _PLAIN_TITLE, None, None)]


def _rows(compared: Compared, engine: str, title: str, faster: Hold | None, sooner: Hold | None) -> list[BenchRow]:
    name = compared.workload.name
    rates, starts = ([figure(one) for one in (OURS, engine)] for figure in (compared.per_minute, compared.start_s))
    return [
        BenchRow(f"{name}: rounds per minute", rates[0], title, rates[1], "rounds/min", faster),
        BenchRow(f"{name}: first round", starts[0], title, starts[1], "s", sooner),
    ]
