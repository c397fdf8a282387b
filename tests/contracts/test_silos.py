"""Silos of several ranks in a real run over HTTP: the ranks of `torchrun` are one client."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from examples.silo_of_ranks import N_SILOS, network, records
from tests.contracts.house import House
from tests.contracts.silo_clients import HERE as CLIENTS
from tests.contracts.test_client_and_coordinator import ends, fails
from tests.repository import ROOT
from tests.servers.waits import LIMIT_S, wait_for_file
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.client import LocalPlan, TorchClient
from umbel.client.training.shared_state import SharedState

pytestmark = pytest.mark.slow
HERE = "examples.silo_of_ranks"
PLAIN = (ROOT / "examples" / "silo_of_ranks.toml").read_text()


def started(
    house: House, folder: Path, number: int, app: str, n_ranks: int, *more: str, restarts: int = 0
) -> "subprocess.Popen[str]":
    """A silo that takes part in the run, as its operator would start it. `app`: of `HERE`, if it names no module."""
    with house.operator() as operator:
        (token,) = operator.create_tokens()
    name = f"silo-{number}"
    own = {"SILO": str(number), "UMBEL_TOKEN": token, "NOTES": str(folder)}
    named = app if ":" in app else f"{HERE}:{app}"
    flags = {"--server": house.url, "--app": named, "--run": "silos", "--state": str(folder / name)}
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    launch += ["--max-restarts", str(restarts), "-m", "--"]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            *launch[: len(launch) * (n_ranks > 1)],
            "umbel",
            "join",
            "--name",
            name,
            "--json",
            *chain(*flags.items()),
            *more,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def begun(folder: Path, run_file: str) -> Generator[House]:
    """A coordinator with the run, which waits for its silos."""
    house = House(folder / "coordinator")
    try:
        shared = SharedState(first_model())
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


def of_one(more: str = "") -> str:
    """A run of one client."""
    text = PLAIN.replace("target = 3", "target = 1").replace("minimum = 3", "minimum = 1")
    return text.replace("local_epochs = 2", "local_epochs = 5") + more


def test_after_the_kill_of_a_rank_the_silo_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    expected = model_of([("plain", 1)], tmp_path / "plain", of_one())
    with begun(tmp_path, of_one()) as house:
        silo = started(house, tmp_path, 0, f"{CLIENTS}:slow", 2, restarts=1)
        wait_for_file(tmp_path / "1.0.pid", silo)
        for rank in ("0", "1"):
            wait_for_file(tmp_path / "silo-0" / "ranks" / rank / "0.checkpoint.safetensors", silo)
        os.kill(int((tmp_path / "1.0.pid").read_text()), signal.SIGKILL)
        _, log = silo.communicate(timeout=LIMIT_S)
        assert silo.returncode == 0, log
        assert log.count("training resumes after step") == 2, log  # on both ranks
        assert "declines" not in log
        found = last_model(house, tmp_path)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_a_killed_silo_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    expected = model_of([("plain", 1)], tmp_path / "plain", of_one())
    with begun(tmp_path, of_one()) as house:
        silo = started(house, tmp_path, 0, f"{CLIENTS}:slow", 2)
        for rank in ("0", "1"):
            wait_for_file(tmp_path / "silo-0" / "ranks" / rank / "0.checkpoint.safetensors", silo)
        for pid in tmp_path.glob("*.0.pid"):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        silo.communicate(timeout=LIMIT_S)
        silo = started(house, tmp_path, 0, f"{CLIENTS}:slow", 3)
        _, log = silo.communicate(timeout=LIMIT_S)
        assert silo.returncode == 0, log
        assert log.count("the saves of 2 ranks are divided among 3") == 3, log
        assert log.count("training resumes after step") == 3, log
        assert not [*tmp_path.rglob("*.checkpoint.safetensors")]
        found = last_model(house, tmp_path)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def test_a_dead_coordinator_ends_every_rank_with_the_cause(tmp_path: Path) -> None:
    with begun(tmp_path, of_one()) as house:
        silo = started(house, tmp_path, 0, f"{CLIENTS}:slow", 2, "--give-up-after", "3")
        wait_for_file(tmp_path / "silo-0" / "ranks" / "1" / "0.checkpoint.safetensors", silo)
        house.kill()
        log = fails(silo)
    assert log.count("the coordinator has given no usable answer for 3 s") >= 2, log
    assert "rank 0 has ended: the coordinator has given no usable answer for 3 s" in log  # on rank 1


@pytest.mark.nightly
def test_code_that_fails_on_one_rank_ends_the_silo_and_the_coordinator_hears_why(tmp_path: Path) -> None:
    with begun(tmp_path, of_one()) as house:
        log = fails(started(house, tmp_path, 0, f"{CLIENTS}:broken_on_one_rank", 2))
        assert "the client's own code failed on rank 1 with ValueError: this sample is broken" in log
        with house.operator() as operator:
            live = operator.progress("silos").live
        assert live is not None
        assert live.round == 2


@pytest.mark.nightly
def test_code_that_fails_on_all_ranks_is_declined_as_that_of_any_client(tmp_path: Path) -> None:
    with begun(tmp_path, of_one()) as house:
        log = fails(started(house, tmp_path, 0, f"{CLIENTS}:broken_on_all", 2))
        assert "3 assignments of run silos failed in a row" in log
        assert "rank 0 has ended: the client's own code failed with ValueError" in log  # on rank 1


@pytest.mark.nightly
def test_silos_of_shards_and_of_stages_make_the_model_of_plain_clients(tmp_path: Path) -> None:
    expected = model_of([("plain", 1)] * 3, tmp_path / "plain", PLAIN)
    found = model_of([("plain", 1), ("sharded", 2), ("staged", 2)], tmp_path / "silos", PLAIN)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_a_masked_run_of_silos_ends_within_the_spread_of_five_seeds(tmp_path: Path) -> None:
    masked = f"{PLAIN}\n[secure_aggregation]\n"
    model = network()
    model.load_state_dict(model_of([("plain", 1), ("sharded", 2), ("staged", 2)], tmp_path, masked))
    losses = [loss_of(averaged(seed)) for seed in range(5)]
    spread = max(losses) - min(losses)
    assert min(losses) - spread <= loss_of(model) <= max(losses) + spread


def averaged(seed: int) -> nn.Module:
    """The model of the same run, made in this process with other seeds of the clients."""
    clients = [client_of(number) for number in range(N_SILOS)]
    whole = first_model()
    for number in range(1, 4):
        states = list[dict[str, Tensor]]()
        for one in clients:
            one.model.load_state_dict(whole.state_dict())
            plan = LocalPlan(2, batch_size=16, learning_rate=0.05, momentum=0.9, seed=100 * seed + number)
            one.train(one.model, plan)
            states.append({name: value.clone() for name, value in one.model.state_dict().items()})
        whole.load_state_dict({name: torch.stack([one[name] for one in states]).mean(0) for name in states[0]})
    return whole


def loss_of(model: nn.Module) -> float:
    """The mean loss over what all silos hold out."""
    found = [client_of(number).evaluate(model) for number in range(N_SILOS)]
    return sum(one.metrics["loss"] for one in found if one is not None) / N_SILOS


def client_of(number: int) -> TorchClient:
    return TorchClient(network(), "classes", *records(number))


def first_model() -> nn.Sequential:
    torch.manual_seed(11)
    return network()
