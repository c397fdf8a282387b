"""What can be known to go wrong in an experiment is told before its first round, with the point of the sweep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sim.federation.worlds import table
from umbel.sim import simulate
from umbel.sim.engines.work import EngineError
from umbel.sim.experiment.file import TrialSpec, experiment_of
from umbel.sim.experiment.rehearsal import rehearse
from umbel.sim.experiment.trials import Watcher
from umbel.sim.federation.possible import SimulationError
from umbel.sim.models import ModelError

HERE = __name__


class Unheard(Watcher):
    """Fails where a run begins."""

    def begins(self, trial: TrialSpec) -> None:
        raise AssertionError(f"{trial.name} has begun")


def refused(described: dict[str, Any], error: type[Exception], words: str, data: Path | None = None) -> None:
    with pytest.raises(error, match=words):
        simulate(described, data=data, watcher=Unheard())


def too_narrow() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def for_others() -> nn.Module:
    return nn.Linear(12, 10)


def answers_much() -> nn.Module:
    return nn.LSTM(8, 4, batch_first=True)


def has_nothing_to_learn() -> nn.Module:
    return nn.Flatten()


def is_frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)


def own(name: str) -> dict[str, Any]:
    return table() | {"model": {"name": f"{HERE}:{name}"}}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_narrow", r"returns \(2, 3\) for 2 samples of digits; it must return \(2, 10\), a number for each sample"),
        ("for_others", r"cannot take the inputs of digits \(torch\.float32 of shape \(1, 8, 8\)\): .*mat1 and mat2"),
        ("answers_much", r"cannot take the inputs of digits"),
        ("has_nothing_to_learn", r"model .*:has_nothing_to_learn has no parameter to train"),
        ("is_frozen", r"model .*:is_frozen has no parameter to train"),
    ],
)
def test_a_model_that_is_not_for_the_data_is_refused(name: str, words: str) -> None:
    refused(own(name), ModelError, words)


def test_a_model_beyond_the_memory_is_refused_before_it_is_made() -> None:
    described = table(model={"hidden": [1 << 20, 1 << 20]})
    refused(described, ModelError, r"this model has 4,398\.[0-9]+ GB of weights, .* GB of memory are free")


def test_memory_that_does_not_suffice_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(Watcher):
        def begins(self, trial: TrialSpec) -> None:
            torch.empty(1 << 60)

    with pytest.raises(SimulationError, match="there is too little memory"):
        simulate(table(), watcher=Greedy())


@pytest.mark.skipif(bool(__import__("importlib.util").util.find_spec("ray")), reason="Ray is installed here")
def test_a_missing_ray_is_told_at_once_at_a_later_point() -> None:
    described = table(sweep={"engine.name": ["sequential", "ray"]})
    refused(described, ValueError, r"the engine \"ray\" needs Ray, .* \(with engine=ray\)")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("with_norm", r"batch normalization .*; set name = \"auto\" in \[engine\].* \(with own\)"),
        ("with_dropout", r"draws random numbers .*; set name = \"auto\" in \[engine\].* \(with own\)"),
        ("that_looks", r"branches .* on the values of a tensor.*; set name = \"auto\" in \[engine\].* \(with own\)"),
    ],
)
def test_what_cannot_be_stacked_is_told_at_once_at_a_later_point(name: str, words: str) -> None:
    described = table(data={"name": "digits"}, engine={"name": "batched"})
    described["sweep"] = {"how": [{"label": "known"}, {"label": "own", "model": {"name": f"{HERE}:{name}"}}]}
    refused(described, ValueError, words)


@pytest.mark.parametrize("name", ["auto", "threads", "processes"])
def test_more_workers_than_the_cores_can_bear_are_refused(name: str) -> None:
    described = table(engine={"name": name, "workers": 4096})
    refused(described, EngineError, r"engine\.workers is 4096, but this machine has \d+ cores?: more than \d+ ")


def test_what_threads_cannot_train_is_told_at_once_at_a_later_point() -> None:
    described = own("with_dropout") | {"sweep": {"engine.name": ["sequential", "threads"]}}
    refused(described, ValueError, r'set name = "processes" in \[engine\] \(with engine=threads\)')


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs.flatten(1))
        return found if found.sum() > 0 else 2 * found


def that_looks() -> nn.Module:
    return Looking()


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))


def test_files_of_later_points_are_read_at_once(tmp_path: Path) -> None:
    described = table(sweep={"fleet.presence": [{"file": "there.csv"}, {"file": "missing.csv"}]})
    (tmp_path / "there.csv").write_text("device,from_s,until_s\n1,0,1000\n")
    described["fleet"] = {}
    experiment = experiment_of(described, folder=tmp_path)
    with pytest.raises(ValueError, match=r"fleet\.presence\.file names .*missing\.csv, which cannot be read"):
        simulate(experiment, watcher=Unheard())


def test_data_that_are_not_there_are_told_at_once() -> None:
    described = table(sweep={"data.name": ["digits", "mnist"]})
    refused(described, ValueError, r"--data DIR on the command line \(with data=mnist\)")


def test_a_split_that_cannot_be_dealt_is_told_at_once() -> None:
    refused(
        table(sweep={"partition.clients": [30, 5000]}), ValueError, r"too few for 5000 clients .* \(with clients=5000\)"
    )


def test_held_out_data_that_a_later_point_needs_are_missed_at_once() -> None:
    described = table(sweep={"training.evaluate": [False, True]})
    refused(described, ValueError, r"holdout = 0\.1 .* \(with evaluate=True\)")


@pytest.mark.parametrize(("said", "words"), [(143, "far too large"), (1437, ""), (20_000, "far too small")])
def test_a_number_of_all_samples_that_is_far_from_theirs_is_told(said: int, words: str) -> None:
    described = table(training={"algorithm": "scaffold", "total_samples": said})
    found = " ".join(rehearse(experiment_of(described).trials, Path(), None))
    assert ("the 30 clients of this experiment have 1,437 samples together" in found) == bool(words)
    assert words in found
