"""A peer is given the plain loop's work, and what it answers is believed if it comes to the same weights."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from umbel.sim.bench.peer_process import versions_of
from umbel.sim.bench.report import BenchFailed
from umbel.sim.bench.simulate import peer_programs
from umbel.sim.bench.simulate.peer_programs import flower_setups, pfl_setups
from umbel.sim.bench.simulate.peer_run import PeerJob, layers_of, run_peer
from umbel.sim.bench.simulate.peer_work import PeerWork, write_report
from umbel.sim.bench.simulate.peers import Peers, find_peers, peer_rows
from umbel.sim.bench.simulate.timing import PlainLoop, TightLoop, seeds_of
from umbel.sim.bench.simulate.workloads import Workload, workloads
from umbel.sim.commands import bench_app
from umbel.sim.data.data_set import SampleSet
from umbel.sim.engines.device import one_thread

VERSIONS = {"flwr": "1.41.0", "ray": "2.55.1", "torch": "2.13.0"}
COHORTS = (np.array([5, 0, 7]), np.array([1, 5, 2]))
FAKE = """
import json, os, subprocess, sys, time
from pathlib import Path
if sys.argv[1] == "-c":
    print(json.dumps({versions}))
    sys.exit()
folder = Path(sys.argv[-1]).parent
{deed}
"""
HONEST = """
sys.path.insert(0, str(folder))
from peer_work import PeerWork, write_report
work, times = PeerWork(folder), [time.time()]
state = work.start
for number in range(work.n_rounds):
    turns = range(number * work.n_asked, (number + 1) * work.n_asked)
    total = sum(work.sizes[turn] * work.trained(state, turn) for turn in turns)
    state = total / work.sizes[list(turns)].sum()
    times.append(time.time())
write_report(folder, times, state)
"""
FORGETS_WEIGHTS = HONEST.replace("work.sizes[turn] *", "work.sizes[list(turns)].float().mean() *")
LEAVES_A_PROCESS = """
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(Path(__file__).parent / "child").write_text(str(child.pid))
print("about to sleep", flush=True)
time.sleep(600)
"""


def workload_a() -> Workload:
    return next(one for one in workloads() if one.name == "A")


@pytest.fixture(scope="module")
def plain() -> PlainLoop:
    """Two rounds of three of A's clients."""
    workload, weights = workload_a(), list[torch.Tensor]()
    population, loop = workload.population(), TightLoop(workload.recipe.make(), workload.plan)
    with one_thread():
        for number, cohort in enumerate(COHORTS, start=1):
            loop.round(population.data_of(cohort), seeds_of(workload, cohort, number))
            weights.append(loop.state)
    return PlainLoop(1.0, COHORTS, tuple(weights))


@pytest.fixture(scope="module")
def job(plain: PlainLoop) -> PeerJob:
    return PeerJob(workload_a(), workload_a().population(), plain.cohorts, plain.weights[-1])


MakePeer = Callable[..., Path]


@pytest.fixture
def peer_python(tmp_path: Path) -> MakePeer:
    """Makes a file that answers as a peer's interpreter would; it does `deed` where that would run the driver."""

    def make(deed: str = "", versions: dict[str, str] = VERSIONS) -> Path:
        program, python = tmp_path / "fake.py", tmp_path / "python"
        program.write_text(FAKE.format(versions=repr(versions), deed=deed))
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(program))} "$@"\n')
        python.chmod(0o755)
        return python

    return make


def test_what_is_written_is_read_as_the_same_work(tmp_path: Path, job: PeerJob, plain: PlainLoop) -> None:
    """Batch for batch: the peer's side of it comes to the plain loop's weights, to rounding."""
    job.write(tmp_path, by_size=True)
    work = PeerWork(tmp_path)
    assert work.words["by_size"] is True
    assert (work.n_rounds, work.n_asked, work.words["n_clients"]) == (2, 3, 100)
    assert work.sizes.tolist() == [*job.population.sizes(COHORTS[0]), *job.population.sizes(COHORTS[1])]
    with one_thread():
        state = work.start
        for number in range(2):
            turns = [3 * number, 3 * number + 1, 3 * number + 2]
            total = torch.stack([work.sizes[turn] * work.trained(state, turn) for turn in turns]).sum(0)
            state = total / work.sizes[turns].sum()
            assert torch.allclose(state, plain.weights[number], atol=1e-6)
    assert job.apart(state) < 1e-5
    assert job.apart(work.start) == pytest.approx(1.0)
    assert job.apart(state[:-1]) == float("inf")


def test_each_turn_has_every_epoch_of_its_client_s_samples(tmp_path: Path, job: PeerJob) -> None:
    job.write(tmp_path)
    work, cohort = PeerWork(tmp_path), job.population.data_of(COHORTS[1])
    for position in range(3):
        own: SampleSet = cohort.of(position)
        seen = torch.cat([targets for _, targets in work.batches(3 + position)])
        assert sorted(seen.tolist()) == sorted(own.targets.tolist() * 5)
        assert max(len(targets) for _, targets in work.batches(3 + position)) <= 11


@pytest.mark.parametrize("name", ["A", "C", "B"])
def test_a_model_in_words_is_made_again(name: str) -> None:
    model = next(one for one in workloads() if one.name == name).recipe.make()
    words = json.loads(json.dumps(layers_of(model)))
    again = nn.Sequential(*(getattr(nn, kind)(**arguments) for kind, arguments in words))
    again.load_state_dict(model.state_dict())
    inputs = torch.randn(2, *{"A": (64,), "C": (60,), "B": (1, 28, 28)}[name])
    assert torch.equal(model(inputs), again(inputs))


def test_a_layer_that_has_no_words_is_refused() -> None:
    with pytest.raises(KeyError):
        layers_of(nn.Sequential(nn.Dropout()))


@pytest.mark.slow
def test_a_peer_that_does_the_work_has_a_row_for_each_figure_of_ours(peer_python: MakePeer, plain: PlainLoop) -> None:
    peers = find_peers(peer_python(HONEST))
    workload = workload_a()
    ours = {"linear chains, training": 1e-9, "linear chains, whole round": 1e-9}
    training, whole = peer_rows(peers, workload, workload.population(), plain, ours)
    assert training.what == "A: linear chains, training"
    assert training.against.startswith("Flower 1.41.0 on Ray 2.55.1, ")
    assert [training.hold, whole.hold] == ["<= 0.04", None]
    assert training.holds
    assert training.theirs > 0
    [note] = peers.notes
    assert note.startswith("A, ms of a round: Flower 1.41.0")


@pytest.mark.slow
def test_a_peer_s_first_round_counts_from_its_command(peer_python: MakePeer) -> None:
    [flower] = Peers(peer_python(HONEST), VERSIONS).starts()
    assert flower.peer == "Flower"
    assert flower.times.start_s > flower.times.round_s


@pytest.mark.nightly
@pytest.mark.slow
def test_a_peer_that_comes_to_other_weights_is_refused(peer_python: MakePeer, job: PeerJob) -> None:
    peers = Peers(peer_python(FORGETS_WEIGHTS), VERSIONS)
    with pytest.raises(
        BenchFailed, match=r"Flower 1\.41\.0 .* trained other weights than the plain loop in A: they differ by \d"
    ):
        peers.best(job)


def test_a_peer_that_hangs_is_stopped_with_all_that_it_has_started(
    peer_python: MakePeer, job: PeerJob, tmp_path: Path
) -> None:
    peers = Peers(peer_python(LEAVES_A_PROCESS), VERSIONS, limit_s=2.0)
    with pytest.raises(BenchFailed, match=r"had not finished after 2 s; [\s\S]*about to sleep"):
        peers.best(job)
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("print('no such thing'); sys.exit(3)", r"ended with status 3 and no result; [\s\S]*no such thing"),
        ("(folder / 'report.npz').write_text('what?')", "cannot read the report of Flower"),
    ],
)
def test_a_peer_that_fails_is_told_with_what_it_wrote(
    peer_python: MakePeer, job: PeerJob, deed: str, said: str
) -> None:
    with pytest.raises(BenchFailed, match=said):
        Peers(peer_python(deed), VERSIONS).best(job)


def test_a_report_of_other_rounds_is_refused(peer_python: MakePeer, job: PeerJob) -> None:
    less = "import numpy\nnumpy.savez(folder / 'report.npz', times=[1.0, 2.0], weights=numpy.zeros(4810, 'f'))"
    [setup] = flower_setups(VERSIONS)
    with pytest.raises(BenchFailed, match="reports 1 rounds instead of 2"):
        run_peer(peer_python(less), setup, job, 60.0)


def test_a_report_is_there_when_it_is_whole(tmp_path: Path) -> None:
    write_report(tmp_path, [1.0, 2.0], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["report.npz"]
    with np.load(tmp_path / "report.npz") as arrays:
        assert (arrays["times"].tolist(), arrays["weights"].tolist()) == ([1.0, 2.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("versions", "said"),
    [({"torch": "2.13.0"}, "neither flwr nor pfl"), ({"flwr": "1.41.0"}, r"install flwr\[simulation\] there")],
)
def test_an_interpreter_without_peers_is_refused(peer_python: MakePeer, versions: dict[str, str], said: str) -> None:
    with pytest.raises(BenchFailed, match=said):
        find_peers(peer_python(versions=versions))


def test_what_is_no_interpreter_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="cannot ask /bin/echo for its packages"):
        versions_of(Path("/bin/echo"), ["flwr"])
    refused = CliRunner().invoke(bench_app, ["simulate", "--peer-python", str(tmp_path / "python")])
    assert refused.exit_code == 1
    assert "for its packages" in refused.output


def test_pfl_is_run_alone_and_in_as_many_processes_as_share_the_users_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    def titles(n_asked: int, n_cores: int) -> list[str]:
        monkeypatch.setattr(peer_programs, "n_cores", lambda: n_cores)
        return [setup.title for setup in pfl_setups({"pfl": "0.6.0"}, n_asked)]

    by_size = ", users by size"
    assert titles(10, 1) == ["pfl 0.6.0, 1 process"]
    assert titles(10, 4) == ["pfl 0.6.0, 1 process", "pfl 0.6.0, 2 processes", f"pfl 0.6.0, 2 processes{by_size}"]
    assert titles(1000, 16)[1:] == ["pfl 0.6.0, 10 processes", f"pfl 0.6.0, 10 processes{by_size}"]
    assert not pfl_setups(VERSIONS, 10)
    assert not flower_setups({"flwr": "1.41.0"})


def test_several_processes_are_torchrun_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_programs, "n_cores", lambda: 2)
    alone, several, _ = pfl_setups({"pfl": "0.6.0"}, 10)
    assert alone.command(Path("python"), tmp_path) == ["python", str(tmp_path / "pfl_driver.py")]
    assert several.command(Path("python"), tmp_path)[1:-1] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]


def test_the_peers_programs_are_python() -> None:
    for setup in (*flower_setups(VERSIONS), *pfl_setups({"pfl": "0.6.0"}, 10)):
        compile(setup.program, setup.file_name, "exec")
