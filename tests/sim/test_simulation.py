"""`simulate`: what ends it leaves nothing behind, and what is missing is said before the first round."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim.engines.clients.sites import HERE
from tests.sim.federation.worlds import table
from umbel.sim import Watcher, simulate
from umbel.sim.engines.workers.pool import WorkerPool
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.federation.rows import Row
from umbel.sim.simulation import EXPERIMENT_FILE

pytestmark = pytest.mark.usefixtures("blank_pictures")


class Pruned(Exception):
    """Stands in for a tuner's exception, such as `optuna.TrialPruned`."""


class Pruner(Watcher):
    """Prunes after the row of this number, and keeps all rows."""

    def __init__(self, last: int) -> None:
        self.rows, self._last = list[Row](), last

    def row(self, trial: TrialSpec, row: Row) -> None:
        self.rows.append(row)
        if len(self.rows) == self._last:
            raise Pruned


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pids_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every worker process that a pool starts from now on."""
    found = list[int]()
    run = WorkerPool.run

    def noting(self: WorkerPool, *arguments: Any) -> Any:
        for done in run(self, *arguments):
            found.extend(self.pids)
            yield done

    monkeypatch.setattr(WorkerPool, "run", noting)
    return found


OWN: dict[str, Any] = {
    "name": "own",
    "clients": {"app": f"{HERE}:make_client", "count": 6},
    "rounds": {"count": 3, "target": 4, "minimum": 2},
    "training": {"local_epochs": 1, "batch_size": 3, "learning_rate": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("described", [table(), OWN], ids=["model", "clients"])
def test_the_workers_of_a_pruned_run_have_ended(described: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pids = pids_of(monkeypatch)
    with pytest.raises(Pruned):
        simulate(described, changes={"engine.name": "processes", "engine.workers": 2}, watcher=Pruner(2))
    assert pids
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.slow
def test_the_folder_of_a_pruned_run_is_free_and_its_run_goes_on_from_there(tmp_path: Path) -> None:
    pruner, rest = Pruner(2), Pruner(100)
    with pytest.raises(Pruned):
        simulate(table(), tmp_path, watcher=pruner)
    assert (tmp_path / EXPERIMENT_FILE).exists()
    again = simulate(table(), tmp_path, watcher=rest)
    assert again.trials[0].model_sha256 == simulate(table()).trials[0].model_sha256
    assert len(again.trials[0].rows) == 4
    assert len(rest.rows) < 4, "the rows before the end are not simulated again"


@pytest.mark.parametrize("method", ["begins", "ends"])
def test_whatever_method_raises_the_folder_is_free(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise Pruned

    watcher = Watcher()
    monkeypatch.setattr(Watcher, method, raises)
    for _ in range(2):  # a folder that is still locked is refused with a ValueError
        with pytest.raises(Pruned):
            simulate(table(rounds={"count": 1}), tmp_path, watcher=watcher)


def test_a_missing_matplotlib_is_said_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as raised:
        simulate(OWN, tmp_path / "out")
    assert raised.value.name == "matplotlib", "by which the command names the extra to install"
    assert not (tmp_path / "out").exists()
