"""Event files of simulated runs, read again with TensorBoard's own reader."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.sim.experiment.test_own_clients import table
from umbel.client.tensorboard import FOLDER, EventFolderRefused, TensorBoardMissing
from umbel.sim import Watcher, simulate
from umbel.sim.engines.flower.section import FlowerSection
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.federation.rows import Row
from umbel.sim.results.event_files import writing_events

pytestmark = pytest.mark.usefixtures("blank_pictures")


class Interrupted(Watcher):
    """Ends the simulation after some rows, as a kill does, and keeps all rows that it was told."""

    def __init__(self, last: int = 100) -> None:
        self.rows, self._last = list[Row](), last

    def row(self, trial: TrialSpec, row: Row) -> None:
        self.rows.append(row)
        if len(self.rows) == self._last:
            raise KeyboardInterrupt


def curve(folder: Path, tag: str = "loss/train") -> list[tuple[int, float, float]]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(one.step, one.value, one.wall_time) for one in found.Scalars(tag)]


@pytest.mark.slow
def test_each_run_has_a_folder_whose_points_are_its_rows(tmp_path: Path) -> None:
    watcher = Interrupted()
    found = simulate(table(seeds=[0, 1]), tmp_path, watcher=watcher, tensorboard=True)
    assert len(watcher.rows) == sum(len(run.rows) for run in found.trials), "another watcher is told of them too"
    assert [run.trial.folder for run in found.trials] == ["seed-0", "seed-1"]
    for run in found.trials:
        expected: list[Any] = [(row.round, pytest.approx(row.train_loss), row.now_s) for row in run.rows]
        assert curve(tmp_path / FOLDER / run.trial.folder) == expected


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_its_curves(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(table(), tmp_path, watcher=Interrupted(2), tensorboard=True)
    assert len(curve(tmp_path / FOLDER / "seed-0")) == 2
    (run,) = simulate(table(), tmp_path, tensorboard=True).trials
    assert [step for step, _, _ in curve(tmp_path / FOLDER / "seed-0")] == [row.round for row in run.rows] == [1, 2, 3]


def test_a_run_that_ended_without_event_files_gets_them_afterwards(tmp_path: Path) -> None:
    (run,) = simulate(table(), tmp_path).trials
    assert not (tmp_path / FOLDER).exists()
    simulate(table(), tmp_path, tensorboard=True)
    assert [step for step, _, _ in curve(tmp_path / FOLDER / "seed-0")] == [row.round for row in run.rows]


def test_what_is_missing_is_said_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="need a folder: give out"):
        simulate(table(), tensorboard=True)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TensorBoardMissing, match="pip install"):
        simulate(table(), tmp_path / "out", tensorboard=True)
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_of_the_event_files_is_named_before_the_first_round(tmp_path: Path) -> None:
    simulate(table(), tmp_path)
    (tmp_path / FOLDER).write_text("mine")
    rows = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(EventFolderRefused, match=r"tensorboard is no folder, .*: move it away, or name another folder"):
        simulate(table(), tmp_path, tensorboard=True)
    assert (tmp_path / "rounds.jsonl").read_bytes() == rows


def test_the_run_of_a_flower_app_has_curves_without_learning_rates(tmp_path: Path) -> None:
    """Also a run that ended at an earlier start, whose rows nobody is told again."""
    (run,) = simulate(table(rounds={"count": 2, "target": 4, "minimum": 2, "window_s": 600.0})).trials
    of_app = replace(run, trial=replace(run.trial, flower=FlowerSection(app="quickstart")))
    with writing_events(tmp_path, Watcher()) as watcher:
        watcher.begins(of_app.trial)
        watcher.ends(of_app)
    assert [step for step, _, _ in curve(tmp_path / FOLDER / "seed-0")] == [1, 2]
    found = EventAccumulator(str(tmp_path / FOLDER / "seed-0"))
    found.Reload()
    tags: Any = found.Tags()["scalars"]
    assert "clients/reported" in tags
    assert not [tag for tag in tags if tag.startswith("learning_rate")]
