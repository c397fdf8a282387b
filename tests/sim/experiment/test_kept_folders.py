"""A folder in which an experiment is kept: one process at a time, and what was damaged in it is not gone on from."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.sim.federation.worlds import table
from tests.suite.nights import at_night
from umbel.sim import simulate
from umbel.sim.experiment.checkpoint import CHECKPOINT_FILE, ROWS_FILE, CheckpointError
from umbel.sim.simulation import EXPERIMENT_FILE, RUNS_FOLDER

RUN = Path(RUNS_FOLDER) / "seed-0"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a finished experiment has left."""
    out = tmp_path_factory.mktemp("finished") / "out"
    simulate(table(rounds={"count": 2}), out)
    return out


@pytest.fixture
def kept(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, for this test to damage."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def rewritten(path: Path, change: Callable[[dict[str, object], dict[str, str]], None]) -> None:
    """A checkpoint with other tensors, or with other words."""
    with safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        metadata = dict(opened.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def add_to_a_weight(tensors: dict[str, object], _: dict[str, str]) -> None:
    name = next(name for name in tensors if name.startswith("published/"))
    tensors[name] = tensors[name] + 1.0  # type: ignore[operator]


def leave_out_a_tensor(tensors: dict[str, object], _: dict[str, str]) -> None:
    del tensors[next(name for name in tensors if name.startswith("master/"))]


def claim_more_rows(_: dict[str, object], metadata: dict[str, str]) -> None:
    metadata["umbel"] = json.dumps({**json.loads(metadata["umbel"]), "rows_bytes": 1_000_000_000})


@pytest.mark.parametrize("change", [add_to_a_weight, leave_out_a_tensor, claim_more_rows])
def test_a_checkpoint_that_is_not_as_it_was_written_is_refused(
    kept: Path, change: Callable[[dict[str, object], dict[str, str]], None]
) -> None:
    size = (kept / RUN / ROWS_FILE).stat().st_size
    rewritten(kept / RUN / CHECKPOINT_FILE, change)
    with pytest.raises(CheckpointError, match=r"is damaged .*; remove its folder to start again"):
        simulate(table(rounds={"count": 2}), kept)
    assert (kept / RUN / ROWS_FILE).stat().st_size == size


@pytest.mark.parametrize("damage", ["gone", "shorter", "another figure", "another order", "a folder"])
def test_rows_that_are_damaged_are_refused(kept: Path, damage: str) -> None:
    path = kept / RUN / ROWS_FILE
    rows = path.read_bytes()
    match damage:
        case "gone":
            path.unlink()
        case "shorter":
            path.write_bytes(rows[:-20])
        case "another figure":
            path.write_bytes(rows.replace(b'"accuracy": 0.', b'"accuracy": 1.'))
            assert path.read_bytes() != rows
        case "another order":
            path.write_bytes(b"".join(reversed(rows.splitlines(keepends=True))))
            assert path.read_bytes() != rows
        case _:
            path.unlink()
            path.mkdir()
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl is damaged or missing; remove its folder"):
        simulate(table(rounds={"count": 2}), kept)


def test_a_checkpoint_that_is_no_file_is_refused(kept: Path) -> None:
    (kept / RUN / CHECKPOINT_FILE).unlink()
    (kept / RUN / CHECKPOINT_FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"is not a file; remove "):
        simulate(table(rounds={"count": 2}), kept)


@pytest.mark.parametrize("scheme", [{"scheme": "natural"}, {"scheme": "iid", "clients": 3}])
def test_data_that_are_somebodys_by_nature_and_hold_nothing_back_are_kept(
    tmp_path: Path, scheme: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "grouped_data.py").write_text(GROUPED_DATA)
    described = table(partition=None, model={"name": "logistic", "hidden": None}, rounds={"count": 1, "target": 3})
    described |= {"data": {"name": "grouped_data:made"}, "partition": scheme, "model": {"name": "logistic"}}
    first = simulate(described, tmp_path / "out")
    assert simulate(described, tmp_path / "out").trials[0].model_sha256 == first.trials[0].model_sha256


def test_a_run_does_not_go_on_from_another_runs_checkpoint(tmp_path: Path) -> None:
    described = table(rounds={"count": 1}, seeds=[0, 1])
    simulate(described, tmp_path)
    first, second = (tmp_path / RUNS_FOLDER / f"seed-{seed}" for seed in (0, 1))
    for name in (ROWS_FILE, CHECKPOINT_FILE):
        shutil.copy(first / name, second / name)
    with pytest.raises(CheckpointError, match=r"the run \(seed 0\).* and the run \(seed 1\) changed since"):
        simulate(described, tmp_path)


def test_the_last_model_is_a_file_that_torch_reads(tmp_path: Path) -> None:
    (run,) = simulate(table(rounds={"count": 2}), tmp_path).trials
    file = tmp_path / RUN / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == run.model_sha256 == run.rows[-1].model_sha256
    shapes = sorted(tuple(value.shape) for value in load_file(file).values())
    assert shapes == [(8,), (8, 64), (10,), (10, 8)]


def test_a_run_that_is_over_says_which_engine_did_its_work(tmp_path: Path) -> None:
    described = table(engine={"name": "auto"}, rounds={"count": 1})
    assert simulate(described, tmp_path).summary()["runs"][0]["engine"] == "batched"
    assert simulate(described, tmp_path).summary()["runs"][0]["engine"] == "batched"


def test_two_processes_are_not_at_one_folder(kept: Path) -> None:
    other = os.open(kept, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"another process simulates in .*; wait for it, or choose another folder"):
        simulate(table(rounds={"count": 2}), kept)
    os.close(other)
    assert len(simulate(table(rounds={"count": 2}), kept).trials) == 1


def test_what_is_no_folder_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ValueError, match="is no folder; choose another"):
        simulate(table(), tmp_path / "out")


def test_a_list_of_what_is_kept_that_is_no_text_is_another_experiment(kept: Path) -> None:
    (kept / EXPERIMENT_FILE).write_bytes(b"\x9d\xff")
    with pytest.raises(ValueError, match="another experiment"):
        simulate(table(rounds={"count": 2}), kept)


def write_presence(path: Path, until: int) -> None:
    path.write_text("device,from_s,until_s\n" + "".join(f"{device},0,{until}\n" for device in range(40)))


OWN_MODEL = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
GROUPED_DATA = """
import torch
from umbel.sim.data.sets.arrays import dataset

def made():
    torch.manual_seed(3)
    return dataset(torch.randn(90, 4), torch.arange(90) % 3, groups=["a", "b", "c"] * 30)
"""
OWN_DATA = """
import torch
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.data_set import SampleSet
import numpy as np

def made():
    torch.manual_seed(3)
    samples = SampleSet(torch.randn(200, 4), torch.randint(3, (200,)))
    return DataSet("own", samples, np.arange(150), samples.take(np.arange(150, 200)), 3)
"""


@pytest.mark.parametrize(
    ("file", "change", "what"),
    [
        ("presence.csv", lambda path: write_presence(path, 4000), r"fleet\.presence\.file \(presence\.csv\)"),
        *at_night(
            (
                "kept_net.py",
                lambda path: path.write_text(OWN_MODEL + "# other"),
                r"model\.name \(kept_net:net, in kept_net\.py\)",
            ),
            (
                "kept_data.py",
                lambda path: path.write_text(OWN_DATA.replace("seed(3)", "seed(4)")),
                r"data \(kept_data:made\)",
            ),
        ),
    ],
)
def test_what_a_run_is_made_of_may_not_change_before_it_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: Callable[[Path], None], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be of an older text of the same second and length
    write_presence(tmp_path / "presence.csv", 5000)
    (tmp_path / "kept_net.py").write_text(OWN_MODEL)
    (tmp_path / "kept_data.py").write_text(OWN_DATA)
    own: dict[str, dict[str, object]] = {
        "presence.csv": {"fleet": {"presence": {"file": "presence.csv"}}},
        "kept_net.py": {"model": {"name": "kept_net:net"}},
        "kept_data.py": {"data": {"name": "kept_data:made"}},
    }
    described = {**table(rounds={"count": 2}), **own[file]}
    done = simulate(described, "out")
    change(tmp_path / file)
    for name in ("kept_net", "kept_data"):
        sys.modules.pop(name, None)
    with pytest.raises(CheckpointError, match=what + " changed since the run in .*seed-0 began"):
        simulate(described, "out")
    write_presence(tmp_path / "presence.csv", 5000)
    (tmp_path / "kept_net.py").write_text(OWN_MODEL)
    (tmp_path / "kept_data.py").write_text(OWN_DATA)
    for name in ("kept_net", "kept_data"):
        sys.modules.pop(name, None)
    assert simulate(described, "out").trials[0].model_sha256 == done.trials[0].model_sha256
