"""A job of `umbel train` whose ranks are killed twenty times: each time it goes on, and it ends in the same model."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.client.datacenter.train.clients import DIARY, HERE, HURRY
from umbel.client.datacenter.train.checkpoint import CHECKPOINT_FILE, ROWS_FILE
from umbel.client.datacenter.train.train import MODEL_FILE
from umbel.client.tensorboard import FOLDER

pytestmark = pytest.mark.nightly
KILLS, RANKS, ROUNDS, SEED = 20, 2, 240, 24
PATIENCE_S = (
    30.0  # from a kill to the next round that is committed; on a busy machine twice the time of the first start
)
MOMENT_S = 0.5  # a kill comes so long at most after a round of this attempt was committed
RUN = f"""
name = "killed"
seed = 5
rounds = {{ count = {ROUNDS}, target = {RANKS}, minimum = {RANKS}, over_selection = 1.0, window_s = 300 }}
training = {{ local_epochs = 1, batch_size = 4, learning_rate = 0.1, algorithm = "scaffold", total_samples = 100 }}
"""


@dataclass(frozen=True, slots=True)
class Noted:
    """What one rank's client has noted when it began a round."""

    process: int
    round: int


@dataclass(frozen=True, slots=True)
class Kill:
    rank: int
    reached: int  # the last round that was committed before the ranks were started again
    saved: int  # the last round of the newest checkpoint
    first: int  # the first round after it
    seconds: float  # from the kill until a round was committed that is newer than all before


class Job:
    """A job of torchrun, seen from outside."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self.folder, self.out = folder, folder / "out"
        folder.mkdir()
        (folder / "run.toml").write_text(RUN)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        umbel = ["-m", "umbel", "train", str(folder / "run.toml"), "--app", f"{HERE}:make_paced", "--out"]
        paths = os.pathsep.join([os.getcwd(), *sys.path])
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [*launcher, f"--max-restarts={restarts}", *umbel, str(self.out), "--tensorboard"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, DIARY: str(folder)},
            stdout=self.log,
            stderr=self.log,
        )

    def notes(self, rank: int) -> list[Noted]:
        path = self.folder / f"{rank}.jsonl"
        return [Noted(**one) for one in whole_lines(path)]

    def processes(self) -> Sequence[int]:
        """Of the ranks, each of which has begun a round."""
        return tuple(notes[-1].process if (notes := self.notes(rank)) else 0 for rank in range(RANKS))

    def rows(self) -> list[dict[str, Any]]:
        return whole_lines(self.out / ROWS_FILE)

    def reached(self) -> int:
        """The newest round that is committed."""
        return max((row["round"] for row in self.rows() if row["committed"]), default=0)

    def saved(self) -> int:
        """The last round of the checkpoint on disk."""
        try:
            with safe_open(self.out / CHECKPOINT_FILE, framework="pt") as file:
                stored = json.loads(file.metadata()["umbel.group"])
        except (FileNotFoundError, SafetensorError):
            return 0
        return int(stored["standing"]["model"]["version"])

    def wait_a_little(self) -> None:
        """Before the next look. Raises `AssertionError` if the job has ended."""
        assert self.process.poll() is None, f"the job has ended: {self.said()}"
        time.sleep(0.01)

    def said(self) -> str:
        return (self.folder / "log").read_text()[-4000:]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that another process writes: the last one may lack its end."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def killed(job: Job, rank: int, patience_s: float) -> Kill:
    """Kill a rank, and wait until a round is committed that is newer than all before."""
    before, reached, saved = job.processes(), job.reached(), job.saved()
    os.kill(before[rank], signal.SIGKILL)
    began, first = time.monotonic(), 0
    while True:
        if not first:
            # In this order, so that what is found is of the ranks that were there before.
            found, newest = job.saved(), job.reached()
            if all(now != then for now, then in zip(job.processes(), before, strict=True)):
                first = next(one.round for one in job.notes(0) if one.process == job.processes()[0])
            else:
                saved, reached = max(saved, found), max(reached, newest)
        elif job.reached() > reached:
            return Kill(rank, reached, saved, first, time.monotonic() - began)
        took = time.monotonic() - began
        assert took < patience_s, f"no round after round {reached} was committed in {took:.0f} s: {job.said()}"
        job.wait_a_little()


def undisturbed(folder: Path) -> Job:
    job = Job(folder, 0)
    (folder / HURRY).touch()
    try:
        assert job.process.wait(300) == 0, job.said()
    finally:
        job.close()
    return job


def test_a_job_whose_ranks_are_killed_twenty_times_loses_no_saved_round_and_ends_in_the_same_model(
    tmp_path: Path,
) -> None:
    """Each kill comes at a random moment after a round of the new ranks. They go on from the newest checkpoint. Ranks
    save after their first round, however long saving takes.
    """
    draw, kills, began = random.Random(SEED), list[Kill](), time.monotonic()
    job = Job(tmp_path / "killed", KILLS)
    try:
        while not job.reached():
            job.wait_a_little()
        patience_s = max(PATIENCE_S, 2 * (time.monotonic() - began))
        for _ in range(KILLS):
            time.sleep(draw.uniform(0, MOMENT_S))
            kills.append(killed(job, draw.randrange(RANKS), patience_s))
        (job.folder / HURRY).touch()
        assert job.process.wait(300) == 0, job.said()
    finally:
        job.close()
    firsts = [1, *(one.first for one in kills)]
    for one, first in zip(kills, firsts, strict=False):  # `first`: of the ranks before the kill
        assert one.saved <= one.reached, one
        assert one.first == one.saved + 1, one
        assert one.saved >= first or one.reached == first, one
    seconds, lost = [one.seconds for one in kills], [one.reached - one.saved for one in kills]
    print(f"training again after {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s; lost rounds: {lost}")
    other = undisturbed(tmp_path / "undisturbed")
    rows = job.rows()
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    assert [row["model_sha256"] for row in rows] == [row["model_sha256"] for row in other.rows()]
    assert (job.out / MODEL_FILE).read_bytes() == (other.out / MODEL_FILE).read_bytes()
    events = EventAccumulator(str(job.out / FOLDER))
    events.Reload()
    assert [(one.step, one.wall_time) for one in events.Scalars("loss/train")] == [
        (row["round"], row["ended_at"]) for row in rows
    ]
