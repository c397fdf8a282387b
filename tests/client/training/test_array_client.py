"""An `ArrayClient` in the client's loop: its arrays arrive, what it returns is sent, and a misfit is declined."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.client.doubles.double import TOKEN, URL, Double
from tests.client.local.test_steps import InMemory
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.plans.training import TrainingSection
from umbel.client import (
    ArrayClient,
    ArrayData,
    ArrayModel,
    Checkpoint,
    Evaluation,
    LocalPlan,
    RunEnd,
    TrainResult,
    run_client,
)
from umbel.client.errors import TrainingFailed

Change = Callable[[dict[str, Any], LocalPlan], Any]
RNG = np.random.default_rng(3)
FEATURES = RNG.normal(size=(40, 3)).astype(np.float32)
TARGETS = (FEATURES @ np.array([[1.0], [-2.0], [0.5]], np.float32))[:, 0]


def first_arrays() -> dict[str, Any]:
    return {"w": np.zeros((3, 1), np.float32), "b": np.zeros(1), "half": np.ones(2, np.float16), "n": np.array(7)}


class Changing(ArrayClient):
    """Does this to the arrays in each round, and returns what it gives."""

    def __init__(self, change: Change = lambda arrays, _plan: arrays, private: str = "") -> None:
        super().__init__(first_arrays(), 5)
        self._change, self._private = change, private
        self.seen: list[dict[str, Any]] = []

    def train_arrays(self, arrays: dict[str, Any], plan: LocalPlan) -> tuple[Any, TrainResult]:
        self.seen.append({name: one.copy() for name, one in arrays.items()})
        return self._change(arrays, plan), TrainResult(5, 1, 1)

    def evaluate_arrays(self, arrays: dict[str, Any]) -> Evaluation:
        return Evaluation(2, {"sum": float(arrays["w"].sum())})

    def shares(self, name: str) -> TensorKind | None:
        return "private" if name == self._private else None


def added(arrays: dict[str, Any], _plan: LocalPlan) -> dict[str, Any]:
    return {name: one + one.dtype.type(1) for name, one in arrays.items()}


def take_part(folder: Path, double: Double, app: ArrayClient) -> RunEnd:
    return run_client(app, URL, folder, "demo", TOKEN, "ward-7", transport=double.transport())


def test_arrays_of_every_dtype_travel_and_the_next_round_has_their_new_values(tmp_path: Path) -> None:
    app = Changing(added)
    double = Double(app.model, rounds=3, training=TrainingSection(evaluate=True))
    assert take_part(tmp_path, double, app).accepted == 3
    for number, seen in enumerate(app.seen):
        assert {name: (one.dtype, one.shape) for name, one in seen.items()} == {
            name: (one.dtype, one.shape) for name, one in first_arrays().items()
        }
        assert all((one == first_arrays()[name] + number).all() for name, one in seen.items())
    assert [report["evaluation"]["sum"] for report in double.reports.values()] == [0.0, 3.0, 6.0]


def test_arrays_that_are_changed_in_place_and_arrays_of_another_framework_are_taken(tmp_path: Path) -> None:
    def in_place(arrays: dict[str, Any], _plan: LocalPlan) -> dict[str, Any]:
        arrays["w"] += 1
        return arrays | {"b": torch.ones(1, dtype=torch.float64), "n": 9}

    app = Changing(in_place)
    take_part(tmp_path, Double(app.model, rounds=2), app)
    assert [float(app.seen[1]["w"].sum()), app.seen[1]["b"].tolist(), int(app.seen[1]["n"])] == [3.0, [1.0], 9]


def test_a_private_array_stays_at_the_site_and_keeps_its_value(tmp_path: Path) -> None:
    app = Changing(added, private="b")
    double = Double(app.model, rounds=2)
    double.model_bytes, double.layout = _without(app, "b")
    take_part(tmp_path, double, app)
    assert app.seen[1]["b"].tolist() == [1.0]
    assert all(len(update) == 6 for update in double.updates)  # w, half and n


def _without(app: ArrayClient, name: str) -> Any:
    encoded = encode_model({key: one for key, one in app.model.state_dict().items() if key != name})
    return encoded, decode_model(encoded)[0]


MISFITS: list[tuple[Change, str]] = [
    (
        lambda arrays, _: arrays | {"w": np.ones(3)},
        r"array 'w' has the shape float64\[3\], but the model's has float32\[3, 1\]",
    ),
    (lambda arrays, _: arrays | {"other": np.ones(3)}, "array 'other' is not one of the model's: "),
    (lambda arrays, _: {"w": arrays["w"]}, "array '.*' is missing"),
    (lambda arrays, _: arrays | {"b": np.array([np.nan])}, "array 'b' .* holds a NaN or an infinity"),
    (lambda arrays, _: arrays | {"w": arrays["w"].astype(object)}, "array 'w' has dtype object"),
]


@pytest.mark.parametrize(("change", "sentence"), MISFITS)
def test_arrays_that_are_not_the_models_are_declined_with_a_sentence(
    tmp_path: Path, change: Change, sentence: str
) -> None:
    app = Changing(change)
    double = Double(app.model)
    with pytest.raises(TrainingFailed, match=f"train_arrays returned arrays that the model cannot take: {sentence}"):
        take_part(tmp_path, double, app)
    assert double.reports == {}
    assert any("returned arrays that the model cannot take" in reason for reason in double.declined.values())


@pytest.mark.parametrize("returned", [None, ({}, 3), ({}, TrainResult(1, 1, 1), 3), TrainResult(1, 1, 1)])
def test_a_training_that_returns_something_else_is_told_what_to_return(returned: Any) -> None:
    class Wrong(Changing):
        def train_arrays(self, arrays: dict[str, Any], plan: LocalPlan) -> Any:
            return returned

    app = Wrong()
    with pytest.raises(TypeError, match="train_arrays must return the arrays by name and a TrainResult, not "):
        app.train(app.model, LocalPlan())


LOWRANK = CodecPlan(Codec.LOWRANK, key=7, parameters={"rank": 1, "mode": "structured"})
ASKS = [
    (TrainingSection(proximal_mu=0.1), CodecPlan()),
    (TrainingSection(clip_norm=1.0), CodecPlan()),
    (TrainingSection(), LOWRANK),
]


@pytest.mark.parametrize(("training", "codec"), ASKS)
def test_a_site_that_ignores_what_the_run_asks_is_declined_and_one_that_adjusts_is_taken(
    tmp_path: Path, training: TrainingSection, codec: CodecPlan
) -> None:
    def by_gradients(arrays: dict[str, Any], plan: LocalPlan) -> dict[str, Any]:
        plan.adjust_arrays({"w": np.ones((3, 1))}, arrays)
        return arrays

    def by_steps(arrays: dict[str, Any], plan: LocalPlan) -> dict[str, Any]:
        return plan.adjust_step(arrays, added(arrays, plan))

    def asking(app: ArrayClient) -> Double:
        double = Double(app.model, training=training)
        double.codec = codec
        return double

    with pytest.raises(TrainingFailed, match=r"an ArrayClient: plan\.adjust_arrays or plan\.adjust_step in each step"):
        take_part(tmp_path / "ignores", asking(app := Changing(added)), app)
    for folder, change in (("gradients", by_gradients), ("steps", by_steps)):
        app = Changing(change)
        assert take_part(tmp_path / folder, asking(app), app).accepted == 1


class Regression(ArrayClient):
    """The loop of `ArrayClient`'s documentation, with an optimizer whose momentum is kept too."""

    def __init__(self) -> None:
        super().__init__({"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}, 40)
        self.data = ArrayData(FEATURES, TARGETS)

    def train_arrays(self, arrays: dict[str, Any], plan: LocalPlan) -> tuple[Any, TrainResult]:
        speed = {name: np.zeros_like(one) for name, one in arrays.items()}
        steps = plan.drive(self.data, keep={"arrays": arrays, "speed": speed})
        for features, targets in steps:
            residual = features @ arrays["w"] + arrays["b"] - targets
            residual += np.random.normal(0, 0.01, residual.shape).astype(np.float32)  # a draw that is restored, too
            gradients = {"w": 2 * residual @ features / len(residual), "b": 2 * residual.mean()}
            for name, gradient in plan.adjust_arrays(gradients, arrays).items():
                speed[name] = np.float32(0.5) * speed[name] + gradient
                arrays[name] = arrays[name] - np.float32(plan.learning_rate) * speed[name]
            steps.note(loss=float((residual**2).mean()))
        return arrays, steps.result(self.sample_count)


def arrays_of(app: ArrayClient) -> dict[str, Any]:
    assert isinstance(app.model, ArrayModel)
    return app.model.arrays()


@pytest.mark.parametrize("dies_at", [1, 6])
def test_a_killed_training_of_arrays_resumes_to_the_same_bits(dies_at: int) -> None:
    def planned(checkpoint: Checkpoint) -> LocalPlan:
        return LocalPlan(epochs=3, batch_size=16, learning_rate=0.1, seed=2, proximal_mu=0.1, checkpoint=checkpoint)

    undisturbed, killed, resumed = Regression(), Regression(), Regression()
    expected = undisturbed.train(undisturbed.model, planned(Checkpoint()).bound_to(undisturbed.model))
    checkpoint = InMemory(dies_at)
    with pytest.raises(KeyboardInterrupt):
        killed.train(killed.model, planned(checkpoint).bound_to(killed.model))
    assert resumed.train(resumed.model, planned(checkpoint).bound_to(resumed.model)) == expected
    found, before = arrays_of(resumed), arrays_of(undisturbed)
    assert all((one == before[name]).all() for name, one in found.items())
    assert checkpoint.n_saves < 9 + dies_at - 1  # the second process did not begin anew


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        ({"m": torch.zeros(2)}, "'m' in 'speed' is a tensor: a dict that is kept holds numpy arrays"),
        ({"m": {"nested": np.zeros(2)}}, "array 'm' has dtype object"),
        ([np.zeros(2)], "what is kept as 'speed' is a list, without state_dict and load_state_dict; only a dict"),
    ],
)
def test_what_would_not_come_back_as_it_is_cannot_be_kept(kept: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        LocalPlan(steps=1).drive(ArrayData(FEATURES), keep={"speed": kept})


def test_the_loop_of_the_documentation_learns_the_target(tmp_path: Path) -> None:
    app = Regression()
    training = TrainingSection(local_epochs=4, batch_size=8, learning_rate=0.1)
    take_part(tmp_path, Double(app.model, rounds=4, training=training), app)
    assert arrays_of(app)["w"] == pytest.approx(np.array([1.0, -2.0, 0.5]), abs=0.05)
