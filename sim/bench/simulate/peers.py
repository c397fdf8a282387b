"""The peers of `umbel bench simulate`: Flower on Ray and pfl-research, each in its best configuration.

They train the same batches of the same clients from the same weights, in the interpreter of `--peer-python`, and must
come to the plain loop's weights, or the benchmark fails. The promises compare our training with their round; another
row has our whole round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from umbel.sim.bench.peer_process import versions_of
from umbel.sim.bench.report import BenchFailed, BenchRow, Hold
from umbel.sim.bench.simulate.peer_programs import flower_setups, pfl_setups
from umbel.sim.bench.simulate.peer_run import PeerJob, PeerTimes, Setup, run_peer
from umbel.sim.bench.simulate.timing import PlainLoop, TightLoop, seeds_of
from umbel.sim.bench.simulate.workloads import Workload, workloads
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.device import one_thread

_FLOWER, _PFL = "Flower", "pfl"
_PACKAGES = ("flwr", "ray", "pfl", "torch")
_PROMISES = {
    ("A", _PFL): 4.0,
    ("A", _FLOWER): 25.0,
    ("C", _PFL): 8.0,
    ("C", _FLOWER): 20.0,
    ("Cs", _PFL): 35.0,
    ("Cs", _FLOWER): 500.0,
}
_AGREE = 1e-3  # of the distance that weights have moved
_AGREE_OF_B = 0.1  # rounding grows in B; a missing client gives 0.17, another order of batches 0.3
_LIMIT_S = 900.0
_ROUNDS_MIN, _TURNS_MAX = 3, 400  # timed: Flower takes 8 ms a turn, and more
TRAINING = "training"  # the figure of ours that has promises


@dataclass(frozen=True, slots=True)
class BestSetup:
    """The fastest setup of a peer. `title`: which one, with its versions."""

    peer: str
    title: str
    times: PeerTimes


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers of an interpreter. `versions`: of its packages. `notes`: the setups measured, a sentence a workload."""

    python: Path
    versions: Mapping[str, str]
    limit_s: float = _LIMIT_S
    notes: list[str] = field(default_factory=list[str])

    def best(self, job: PeerJob) -> list[BestSetup]:
        """The best setup of each peer. Raises `BenchFailed`, also for a peer that trains other weights."""
        found, said = list[BestSetup](), list[str]()
        for peer, setups in self._setups(job.n_asked).items():
            taken = [BestSetup(peer, setup.title, self._measured(setup, job)) for setup in setups]
            found.append(min(taken, key=lambda one: one.times.round_s))
            said += [f"{one.title} {1e3 * one.times.round_s:,.0f}" for one in taken]
        self.notes.append(f"{job.workload.name}, ms of a round: {'; '.join(said)}.")
        return found

    def starts(self) -> list[BestSetup]:
        """Each peer in one setup, with 100 clients of which ten are asked: workload A with its first clients."""
        workload = next(one for one in workloads() if one.name == "A")
        population, cohort = workload.population(), np.arange(workload.n_asked)
        loop = TightLoop(workload.recipe.make(), workload.plan)
        with one_thread():
            loop.round(population.data_of(cohort), seeds_of(workload, cohort, 1))
        job = PeerJob(workload, population, (cohort,), loop.state)
        setups = {peer: ways[0] for peer, ways in self._setups(job.n_asked).items()}
        return [BestSetup(peer, setup.title, self._measured(setup, job)) for peer, setup in setups.items()]

    def _measured(self, setup: Setup, job: PeerJob) -> PeerTimes:
        times = run_peer(self.python, setup, job, self.limit_s)
        allowed = _AGREE_OF_B if job.workload.name == "B" else _AGREE
        if not (apart := job.apart(times.weights)) < allowed:
            raise BenchFailed(
                f"{setup.title} trained other weights than the plain loop in {job.workload.name}: they differ by "
                f"{apart:.2%} of the distance that the weights moved, and rounding explains at most {allowed:.1%}"
            )
        return times

    def _setups(self, n_asked: int) -> dict[str, Sequence[Setup]]:
        ways = {_FLOWER: flower_setups(self.versions), _PFL: pfl_setups(self.versions, n_asked)}
        return {peer: setups for peer, setups in ways.items() if setups}


def find_peers(python: Path) -> Peers:
    """The peers of an interpreter. Raises `BenchFailed` if it has none."""
    python = python.absolute()  # not resolved: in a virtual environment it is a link
    versions = versions_of(python, _PACKAGES)
    if "flwr" in versions and "ray" not in versions:
        raise BenchFailed(f"{python} has flwr without Ray; install flwr[simulation] there")
    if not versions.keys() & {"flwr", "pfl"}:
        raise BenchFailed(f"{python} has neither flwr nor pfl; install one there, or leave out --peer-python")
    return Peers(python, versions)


def peer_rows(
    peers: Peers, workload: Workload, population: ShardedPopulation, plain: PlainLoop, ours: Mapping[str, float]
) -> list[BenchRow]:
    """`ours`: seconds of our round, by what it includes. Raises `BenchFailed`."""
    n_rounds = 1 + min(len(plain.cohorts) - 1, max(_ROUNDS_MIN, _TURNS_MAX // workload.n_asked))
    job = PeerJob(workload, population, plain.cohorts[:n_rounds], plain.weights[n_rounds - 1])
    return [_row(workload.name, how, seconds, best) for best in peers.best(job) for how, seconds in ours.items()]


def _row(workload: str, how: str, seconds: float, best: BestSetup) -> BenchRow:
    times = _PROMISES.get((workload, best.peer)) if how.endswith(TRAINING) else None
    promise = None if times is None else Hold(round(1 / times, 6))
    return BenchRow(f"{workload}: {how}", 1e3 * seconds, best.title, 1e3 * best.times.round_s, "ms", promise)
