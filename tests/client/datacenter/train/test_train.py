"""`umbel train` under torchrun, with real processes: killed, told to stop, and with code that fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.client.datacenter.train.clients import HERE, RANK, ROUND
from tests.client.datacenter.train.test_parity import by_simulator
from tests.contracts.own_clients import HERE as USUAL
from tests.servers.ports import own_port

pytestmark = pytest.mark.slow
ROUNDS = 6
RUN = f"""
name = "trained"
seed = 5
rounds = {{ count = {ROUNDS}, target = 2, minimum = 2, over_selection = 1.0, window_s = 300 }}
training = {{ local_epochs = 2, batch_size = 4, learning_rate = 0.1, algorithm = "scaffold", total_samples = 100 }}
"""


def train(
    app: str,
    folder: Path,
    *,
    restarts: int = 0,
    again: bool = False,
    ranks: int = 2,
    run: str = RUN,
    leaves: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Some ranks of `umbel train`. `leaves`: the round in which the machine of one is taken away."""
    (folder / "run.toml").write_text(run)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    umbel = ["-m", "umbel", "train", str(folder / "run.toml"), "--app", f"{HERE}:{app}", "--out", str(folder / "out")]
    return subprocess.run(
        [*launcher, f"--max-restarts={restarts}", *umbel, "--compare-updates", "--tensorboard"],
        env=environment | {"UMBEL_TEST_LEAVES": str(leaves)} | ({"UMBEL_TEST_AGAIN": "1"} if again else {}),
        capture_output=True,
        text=True,
        timeout=300,
    )


def train_on_two_machines(app: str, folder: Path) -> list[str]:
    """What two agents of torchrun say, of which each has one rank, and none knows of the other's restarts."""
    (folder / "run.toml").write_text(RUN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-id=two-machines", f"--rdzv-endpoint=127.0.0.1:{own_port()}"]
    umbel = ["-m", "umbel", "train", str(folder / "run.toml"), "--app", f"{HERE}:{app}", "--out", str(folder / "out")]
    command = [*launcher, "--local-addr=127.0.0.1", *umbel]
    agents = list[subprocess.Popen[str]]()
    try:
        for number in range(2):
            with (folder / f"agent{number}.log").open("w") as log:
                agents.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True))
        codes = [one.wait(timeout=400) for one in agents]
    finally:
        for one in agents:
            one.terminate()
            one.wait()
    said = [(folder / f"agent{number}.log").read_text() for number in range(2)]
    assert codes == [0, 0], said
    return said


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "rounds.jsonl").read_text().splitlines()]


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return found


def test_after_the_kill_of_a_rank_torchrun_ends_the_run_in_the_same_models(tmp_path: Path) -> None:
    """Its clients keep control variates from round to round, which the killed rank finds again."""
    done = train("make_killed", tmp_path, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "another rank of this job is lost" in done.stderr
    task = {"app": f"{USUAL}:make_torch_client", "run_file": RUN}
    rows = rows_of(tmp_path)
    assert [row["model_sha256"] for row in rows] == by_simulator(task, 2)
    for row in rows:
        assert len(row["update_norms"]) == 2
        assert row["update_norm"] == pytest.approx(sum(row["update_norms"]) / 2)
        assert 0 < row["update_cosine"] <= 1
        assert 0 < row["compute_share"] < 1
        assert row["samples_per_s"] > 0
    assert f"finished: all {ROUNDS} rounds are committed" in done.stdout
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    for tag, name in (("seconds/sum_s", "sum_s"), ("updates/update_norm", "update_norm"), ("loss/train", "train_loss")):
        shown = [(one.step, one.value, one.wall_time) for one in events.Scalars(tag)]
        assert shown == [(row["round"], pytest.approx(row[name]), row["ended_at"]) for row in rows]


@pytest.mark.nightly
def test_after_the_kill_of_a_rank_those_of_two_machines_find_each_other_again(tmp_path: Path) -> None:
    said = train_on_two_machines("make_killed", tmp_path)
    assert "another rank of this job is lost" in "".join(said)
    task = {"app": f"{USUAL}:make_torch_client", "run_file": RUN}
    assert [row["model_sha256"] for row in rows_of(tmp_path)] == by_simulator(task, 2)


def test_a_rank_that_must_leave_saves_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    left = train("make_stopped", tmp_path)
    assert left.returncode == 1
    assert f"rank {RANK} must leave: SIGTERM received" in left.stdout
    rows = rows_of(tmp_path)
    assert [row["round"] for row in rows] == list(range(1, ROUND + 1))
    assert rows[-1]["partial"] == 2  # the other rank has heard of it, and did not go on for hours
    assert summary_of(tmp_path)["leaving"]
    gone_on = train("make_stopped", tmp_path, again=True)
    assert gone_on.returncode == 0, gone_on.stderr
    assert rows_of(tmp_path)[: len(rows)] == rows
    assert [row["round"] for row in rows_of(tmp_path)] == list(range(1, ROUNDS + 1))
    assert (summary_of(tmp_path)["rounds"], summary_of(tmp_path)["leaving"]) == (ROUNDS, "")


@pytest.mark.nightly
def test_a_run_goes_on_with_fewer_ranks_and_with_more_again(tmp_path: Path) -> None:
    run = RUN.replace(', algorithm = "scaffold", total_samples = 100', "")
    for ranks, leaves in ((4, 2), (2, 4)):
        left = train("make_leaving", tmp_path, ranks=ranks, run=run, leaves=leaves)
        assert left.returncode == 1, left.stderr
        assert rows_of(tmp_path)[-1]["round"] == leaves
    ended = train("make_leaving", tmp_path, ranks=4, run=run)
    assert ended.returncode == 0, ended.stderr
    rows = rows_of(tmp_path)
    assert [(row["round"], row["committed"]) for row in rows] == [(number, True) for number in range(1, ROUNDS + 1)]
    assert summary_of(tmp_path)["ranks"] == 4


def test_code_that_fails_ends_all_ranks_and_is_named(tmp_path: Path) -> None:
    failed = train("make_failing", tmp_path)
    assert failed.returncode != 0
    sentence = f"the code of rank {RANK} failed: ValueError: no such scanner (clients.py, line "
    assert failed.stderr.count(sentence) == 2
    assert "Traceback" not in failed.stderr.partition("torch/distributed")[0]
