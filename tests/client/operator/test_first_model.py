"""A model file as a run takes it: kinds of [tensors] are written, what stays at the sites is left out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.model.layout import CONTROL_PREFIX, Layout
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.tensors import TensorKind, TensorRules
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.client.operator.first_model import fitted_model, leave_out_control

STATE = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}
RULES = TensorRules({"global": ("b",), "private": ("c",)})


def test_a_name_of_what_the_servers_optimizer_remembers_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "init.safetensors").write_bytes(encode_model({"umbel.steps": torch.ones(1), **STATE}))
    with fitted_model(path, run(None)) as first:
        assert first.path == path
    remembering = replace(run(None), aggregation=AggregationSection(optimizer="momentum"))
    with (
        pytest.raises(LayoutError, match=r"'umbel.steps' has a name .* rename the tensor"),
        fitted_model(path, remembering),
    ):
        pass


def test_a_run_with_scaffold_begins_with_control_variates_of_zeros_which_an_export_leaves_out(tmp_path: Path) -> None:
    state = {**STATE, "n": torch.ones(1, dtype=torch.int64)}
    (path := tmp_path / "init.safetensors").write_bytes(encode_model(state))
    scaffold = replace(run(RULES), training=TrainingSection(algorithm="scaffold", total_samples=30))
    with fitted_model(path, scaffold) as first:
        layout, made = decode_model(first.path.read_bytes())
        again = tmp_path / "of another run.safetensors"
        again.write_bytes(first.path.read_bytes())
    assert layout == layout.model.with_control
    assert [spec.name for spec in layout.tensors if spec.kind == "control"] == [f"{CONTROL_PREFIX}a"], "weights alone"
    assert torch.equal(made[f"{CONTROL_PREFIX}a"], torch.zeros(2))
    with fitted_model(again, run(None)) as first:
        assert decode_model(first.path.read_bytes())[0] == layout.model, "a run without SCAFFOLD has none"
    made[f"{CONTROL_PREFIX}a"] += 1.0
    again.write_bytes(encode_model(made, layout))
    with fitted_model(again, scaffold) as first:
        assert not decode_model(first.path.read_bytes())[1][f"{CONTROL_PREFIX}a"].any(), "each run begins anew"
    assert leave_out_control(again)
    assert decode_model(again.read_bytes())[1].keys() == {"a", "b", "n"}
    assert not leave_out_control(again)


def written(folder: Path, **kinds: TensorKind) -> Path:
    path = folder / "init.safetensors"
    path.write_bytes(encode_model(STATE, Layout.of_state(STATE, lambda name: kinds.get(name, "mean"))))
    return path


def run(rules: TensorRules | None) -> RunFile:
    patterns, sha256 = ({}, "") if rules is None else (rules.patterns, rules.base_sha256)
    return RunFile("r", RoundsSection(1, 1), tensors=patterns, base_sha256=sha256)


@pytest.mark.parametrize("rules", [None, TensorRules({}, "ab" * 32)])
def test_a_file_that_fits_is_uploaded_as_it_is(tmp_path: Path, rules: TensorRules | None) -> None:
    path = written(tmp_path)
    with fitted_model(path, run(rules)) as first:
        assert (first.path, first.remarks) == (path, ())


def test_kinds_are_written_and_private_tensors_left_out_the_same_way_each_time(tmp_path: Path) -> None:
    path, made = written(tmp_path), list[bytes]()
    for _ in range(2):
        with fitted_model(path, run(RULES)) as first:
            made.append(first.path.read_bytes())
            assert first.remarks == ("left out of the upload: 1 private tensor (c)",)
    assert made[0] == made[1]
    layout, state = decode_model(made[0])
    assert {spec.name: spec.kind for spec in layout.tensors} == {"a": "mean", "b": "global"}
    assert torch.equal(state["b"], STATE["b"])
    path.write_bytes(made[0])
    with fitted_model(path, run(RULES)) as again:
        assert again.path == path, "a file that was made so needs no change"


@pytest.mark.parametrize(
    ("rules", "kinds", "words"),
    [
        (
            TensorRules({"private": ("b",)}),
            {"b": "global"},
            "'b' has the kind global in the model file, but the kind pri",
        ),
        (TensorRules({"private": ("*",)}), {}, "there is nothing to train"),
        (TensorRules({"global": ("bb",)}), {}, "the pattern 'bb' in .* matches no tensor"),
        (
            TensorRules({"base": ("c",)}),
            {},
            r"has no base_sha256, but the base .* write the line base_sha256 = \"[0-9a-f]{64}",
        ),
        (TensorRules({"base": ("c",)}, "ab" * 32), {}, "has base_sha256 = abababababab…, but the base tensors"),
        (TensorRules({"base": ("c",), "private": ("c",)}), {}, "'c' is in two lists"),
    ],
)
def test_a_file_that_cannot_be_the_runs_is_refused(
    tmp_path: Path, rules: TensorRules, kinds: dict[str, TensorKind], words: str
) -> None:
    with pytest.raises(LayoutError, match=words), fitted_model(written(tmp_path, **kinds), run(rules)):
        pass


def test_the_base_of_the_run_file_is_left_out(tmp_path: Path) -> None:
    rules = TensorRules({"base": ("c",)}, base_sha256({"c": STATE["c"]}))
    with fitted_model(written(tmp_path), run(rules)) as first:
        assert set(decode_model(first.path.read_bytes())[1]) == {"a", "b"}
        assert first.remarks == ("left out of the upload: 1 base tensor (c)",)


def test_a_pattern_that_leaves_nothing_out_beside_others_that_do_is_warned_of(tmp_path: Path) -> None:
    with fitted_model(written(tmp_path), run(TensorRules({"private": ("c", "bn.wieght")}))) as first:
        assert first.remarks[1].startswith("careful: the pattern 'bn.wieght' in [tensors] matches no tensor")


def test_averaged_running_statistics_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "init.safetensors"
    path.write_bytes(encode_model(torch.nn.BatchNorm1d(2).state_dict()))
    with fitted_model(path, run(None)) as first:
        [remark] = first.remarks
    assert remark.startswith("careful: the running statistics running_mean, running_var are averaged over clients")
