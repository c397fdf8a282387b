"""`umbel train` with clients of several ranks: they make the models of clients in one process each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.client.datacenter.train.divided_clients import HERE

pytestmark = pytest.mark.slow
RUN = """
name = "divided"
seed = 5
rounds = { count = 3, target = 2, minimum = 2, over_selection = 1.0, window_s = 300 }
training = { local_epochs = 2, batch_size = 5, learning_rate = 0.1, algorithm = "scaffold", total_samples = 100 }
evaluation = { every = 1, clients = 2 }
"""


def trained(app: str, folder: Path, n_ranks: int, *more: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "run.toml").write_text(RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    umbel = ["-m", "umbel", "train", str(folder / "run.toml"), "--app", f"{HERE}:{app}", "--out", str(folder / "out")]
    command = [*launcher, f"--max-restarts={restarts}", *umbel, *more]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("app", "restarts"), [("sharded", 0), pytest.param("killed", 1, marks=pytest.mark.nightly)])
def test_clients_of_two_ranks_make_the_model_of_clients_of_one(app: str, restarts: int, tmp_path: Path) -> None:
    alone = trained("plain", tmp_path / "alone", 2)
    assert alone.returncode == 0, alone.stderr
    divided = trained(app, tmp_path / "divided", 4, "--ranks-per-client", "2", restarts=restarts)
    assert divided.returncode == 0, divided.stderr
    assert ("another rank of this job is lost" in divided.stderr) == bool(restarts)
    assert "forcefully exiting" not in divided.stderr, "each rank that hears of a loss leaves by itself"
    assert "2 of 2 clients" in divided.stdout
    expected, found = (load_file(tmp_path / one / "out" / "model.safetensors") for one in ("alone", "divided"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)
    rows, alike = (
        [json.loads(line) for line in (tmp_path / one / "out" / "rounds.jsonl").read_text().splitlines()]
        for one in ("divided", "alone")
    )
    for row, other in zip(rows, alike, strict=True):
        assert row["reported"] == other["reported"]
        assert row["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)
    summary = json.loads((tmp_path / "divided" / "out" / "summary.json").read_text())
    assert (summary["ranks"], summary["ranks_per_client"]) == (4, 2)


def test_ranks_that_make_no_whole_clients_are_refused(tmp_path: Path) -> None:
    refused = trained("sharded", tmp_path / "refused", 3, "--ranks-per-client", "2")
    assert refused.returncode != 0
    assert "3 ranks cannot be divided into clients of 2 ranks each: start a multiple of 2" in refused.stderr


def test_code_that_adds_up_over_the_ranks_of_other_clients_is_refused(tmp_path: Path) -> None:
    refused = trained("mixed", tmp_path / "mixed", 4, "--ranks-per-client", "2")
    assert refused.returncode != 0
    assert "has added up over all 4 ranks of the job" in refused.stderr
    assert "process_group=mesh.get_group()" in refused.stderr


def test_a_model_over_the_ranks_of_other_clients_is_refused_before_a_client_that_does_not_train_could_wait_for_it(
    tmp_path: Path,
) -> None:
    refused = trained("unnamed", tmp_path / "unnamed", 4, "--ranks-per-client", "2")
    assert refused.returncode != 0
    assert (
        "the model of client 0 adds up over the ranks 0, 1, 2, 3 of the job, but this client has only 0, 1, so its "
        "work would be mixed with that of the clients that have 2, 3. Name the client's own ranks with the mesh"
    ) in refused.stderr
    assert not (tmp_path / "unnamed" / "out").exists(), "no round has begun"


@pytest.mark.nightly
def test_code_that_fails_on_a_rank_that_follows_is_named(tmp_path: Path) -> None:
    failed = trained("failing", tmp_path / "failed", 4, "--ranks-per-client", "2")
    assert failed.returncode != 0
    assert "failed on rank 1 of client 0 with ValueError: no such scanner (divided_clients.py, line " in failed.stderr
