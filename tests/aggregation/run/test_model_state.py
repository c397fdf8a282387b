"""The simulator's next model is the coordinator's, to the bit, with each server optimizer, with and without changes for
clients to fetch."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from umbel.aggregation.model.artifact import metadata_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import ServerStep
from umbel.aggregation.optimizers.section import AggregationSection, ServerOptimizerName
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.update.grid import GridAccumulator
from umbel.server.blobs.blobs import model_key
from umbel.server.blobs.local import LocalBlobs
from umbel.server.sums.model_files import ParentFiles, SummedRound, first_master, keep_model, next_model


@pytest.mark.parametrize("change_step", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", get_args(ServerOptimizerName))
def test_both_make_the_same_files_of_the_same_sum(
    tmp_path: Path, optimizer: ServerOptimizerName, dtype: torch.dtype, change_step: float | None
) -> None:
    step = ServerStep.of((AggregationSection(optimizer=optimizer), TrainingPlan()), 1, 1, 1)
    draw = torch.Generator().manual_seed(0)
    state = {"b": torch.randn(40, generator=draw).to(dtype), "a": torch.randn(30, 20, generator=draw).to(dtype)}
    layout = Layout.of_state(state)
    total = GridAccumulator(layout.n_values, Grid.finest(max_abs=64.0, total_weight_max=100))
    total.fold_vector(torch.randn(layout.n_values, generator=draw), 3)
    ours = ModelState.first(state, optimizer=step.optimizer)
    blobs = LocalBlobs(tmp_path / "blobs")
    blobs.prepare()
    save_file({name: state[name] for name in sorted(state)}, tmp_path / "model", metadata_of(layout))
    kept = keep_model(blobs, tmp_path / "model")
    base = ParentFiles(kept.sha256, first_master(blobs, kept.sha256, layout, step.optimizer))
    for _ in range(3):  # each begins where the one before has ended
        ours = ours.after(total, step, change_step)
        theirs = next_model(blobs, layout, base, SummedRound("", total), step, change_step)
        assert ours.file.sha256 == theirs.published.sha256
        assert (ours.change and ours.change.sha256) == (theirs.change and theirs.change.sha256)
        with blobs.local(model_key(theirs.master_sha256)) as path:
            stored = load_file(path)
        assert stored.keys() == ours.master.keys()
        assert all(torch.equal(stored[name], values) for name, values in ours.master.items())
        base = ParentFiles(theirs.published.sha256, theirs.master_sha256)
