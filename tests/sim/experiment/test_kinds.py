"""Kinds of tensors in experiments: global tensors stay, others travel, and what needs own clients is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sim.federation.worlds import attempts_of, table
from tests.suite.nights import at_night
from umbel.aggregation.model.artifact import decode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.sections import RoundsSection
from umbel.sim import simulate
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.kinds import layout_of_run
from umbel.sim.experiment.world import make_world

HERE = __name__


def normalized() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def described(**more: Any) -> dict[str, Any]:
    small: dict[str, Any] = {"model": {"name": f"{HERE}:normalized"}, "engine": {"name": "sequential"}}
    return table() | small | more


@pytest.mark.parametrize(
    "more",
    [
        *at_night({}),
        {"downlink": {"name": "change"}},
        {"codec": {"name": "integer"}},
        *at_night({"codec": {"name": "topk", "share": 0.1}}),
    ],
    ids=["float32", "changes", "integers", "topk"],
)
def test_a_global_tensor_is_in_every_model_as_it_was_in_the_first(tmp_path: Path, more: dict[str, Any]) -> None:
    state = dict[str, dict[str, torch.Tensor]]()
    n_bytes, kinds = dict[str, int](), dict[str, set[str]]()
    for name, tensors in (("whole", {}), ("part", {"global": ["1.*"]})):
        results = simulate(described(tensors=tensors, **more), out=tmp_path / name)
        [path] = (tmp_path / name).glob("runs/*/model.safetensors")
        layout, state[name] = decode_model(path.read_bytes())
        kinds[name] = {spec.kind for spec in layout.tensors if spec.name.startswith("1.")}
        n_bytes[name] = results.trials[0].rows[-1].bytes_up
    trial = experiment_of(described(tensors={"global": ["1.*"]}, **more)).trials[0]
    first = make_world(trial, Path(), None).model.published
    assert kinds == {"whole": {"mean"}, "part": {"global"}}
    assert torch.equal(state["part"]["1.weight"], first["1.weight"])
    assert not torch.equal(state["whole"]["1.weight"], first["1.weight"])
    assert not torch.equal(state["part"]["4.weight"], first["4.weight"])
    assert n_bytes["part"] < n_bytes["whole"]


@pytest.mark.parametrize("codec", [{"name": "float32"}, {"name": "integer"}], ids=["float32", "integers"])
def test_a_counter_of_the_kind_count_has_all_steps_of_all_clients(codec: dict[str, Any]) -> None:
    tensors = {"count": ["*.num_batches_tracked"]}
    attempts = attempts_of(described(tensors=tensors, codec=codec))
    done = [one.steps_done for attempt in attempts for one in attempt.record.clients if one.fate in _COUNTED]
    assert int(attempts[-1].model.published["2.num_batches_tracked"]) == sum(done) > 0


_COUNTED = (Fate.ACCEPTED, Fate.PARTIAL)


def test_the_simulator_warns_once_of_averaged_statistics_where_sites_differ() -> None:
    skewed = {"scheme": "dirichlet", "clients": 10, "alpha": 1.0}
    results = simulate(described(partition=skewed, seeds=[0, 1]))
    [note] = [one for one in results.notes if "running statistics" in one]
    assert note.startswith("Careful: the running statistics 2.running_mean, 2.running_var are averaged")


# --- what is refused --------------------------------------------------------------------------------------------------


ADAM = AggregationSection(optimizer="adam")


def file_of(**patterns: tuple[str, ...]) -> RunFile:
    return RunFile("r", RoundsSection(1, 1), tensors=patterns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (file_of(private=("2.*",)), "'2.bias' is private by .* simulate your own clients instead"),
        (file_of(base=("1.*",)), "'1.bias' is base by .* simulate your own clients instead"),
        (file_of(**{"global": ("7.*",)}), "the pattern '7.*' in .* matches no tensor of the model"),
        (file_of(**{"global": ("*",)}), "there is nothing to train"),
        (replace(file_of(**{"global": ("*.weight", "*.bias")}), aggregation=ADAM), r"\"adam\" has nothing to move"),
    ],
)
def test_kinds_that_one_model_cannot_have_are_refused(file: RunFile, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout_of_run(file, Layout.of_state(normalized().state_dict()))
