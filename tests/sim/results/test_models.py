"""`Results.models`: the last model of each run, from memory and from the run's folder."""

from hashlib import sha256
from pathlib import Path

import pytest
import torch

from tests.sim.federation.worlds import table
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.sim import simulate
from umbel.sim.experiment.checkpoint import MODEL_FILE
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.trials import TrialResult, run_trial
from umbel.sim.experiment.world import make_world
from umbel.sim.results.models import Models


def sha256_of(state: dict[str, torch.Tensor]) -> str:
    """The hash that a coordinator gives this model."""
    return sha256(encode_model(state, Layout.of_state(state))).hexdigest()


SWEPT = table(rounds={"count": 2}, seeds=[0, 1], sweep={"training.proximal_mu": [0.0, 1.0]})


def test_each_run_has_its_last_model_in_the_order_of_the_runs() -> None:
    results = simulate(SWEPT)
    assert len(results.models) == len(results.trials) == 4
    for state, trial in zip(results.models, results.trials, strict=True):
        assert sha256_of(state) == trial.model_sha256
    assert [sha256_of(one) for one in results.models[1:3]] == [one.model_sha256 for one in results.trials[1:3]]


def run_in(folder: Path | None, n_rounds: int) -> TrialResult:
    """A run in this folder, without the pictures that `simulate` draws."""
    (trial,) = experiment_of(table(rounds={"count": n_rounds})).trials
    return run_trial(trial, folder, Path(), None)


def test_a_model_from_the_folder_is_the_one_from_memory(tmp_path: Path) -> None:
    written, held = run_in(tmp_path, 2), run_in(None, 2)
    assert (written.model.held, held.model.file) == (None, None)
    there, here = Models([written])[0], Models([held])[0]
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in here)


def test_a_model_loads_into_the_module_and_a_changed_copy_changes_no_other() -> None:
    described = table(rounds={"count": 1})
    results = simulate(described)
    (trial,) = experiment_of(described).trials
    meter = make_world(trial, Path(), None).world.meter
    assert meter is not None
    net = meter.model
    net.load_state_dict(results.models[0])
    assert sha256_of(net.state_dict()) == results.trials[0].model_sha256
    first = results.models[0]
    for value in first.values():
        value.zero_()
    assert sha256_of(results.models[0]) == results.trials[0].model_sha256


def test_a_model_that_was_replaced_in_the_folder_is_refused(tmp_path: Path) -> None:
    early = Models([run_in(tmp_path, 1)])
    run_in(tmp_path, 2)
    with pytest.raises(ValueError, match="is another model than the last one of this run, because the run was ext"):
        early[0]
    (tmp_path / MODEL_FILE).unlink()
    with pytest.raises(FileNotFoundError):
        early[0]
