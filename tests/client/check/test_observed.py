"""What is noted of a client's training, and what of the process is restored after it."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.client.check.clients import Bare, N, Ward
from umbel.client import LocalPlan, TrainResult
from umbel.client.check.observed import ObservedClient, ObservedTraining, marks_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.data())
def test_marks_differ_exactly_if_a_tensor_has_changed(
    dtype: torch.dtype, shape: list[int], data: st.DataObject
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    before = marks_of({"weight": tensor})
    assert marks_of({"weight": tensor.clone()}) == before
    if tensor.numel():
        tensor.view(-1)[data.draw(st.integers(0, tensor.numel() - 1))] = 1
        assert marks_of({"weight": tensor}) != before
    assert marks_of({"weight": tensor.reshape(1, *shape)}) != before


def test_a_mark_does_not_depend_on_how_the_tensor_lies_in_memory() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert marks_of({"weight": tensor.t().contiguous().t()}) == marks_of({"weight": tensor})


def noted(app: Ward, plan: LocalPlan) -> ObservedTraining:
    client = ObservedClient(app)
    client.train(client.model, plan)
    (training,) = client.trainings
    return training


def test_steps_questions_and_the_length_of_the_data_are_noted() -> None:
    training = noted(Ward(), LocalPlan(steps=5, batch_size=8))
    assert training.doings.steps == 5
    assert training.doings.questions == 4  # none after the last step
    assert training.doings.data_lengths == [N]
    assert training.before != training.after
    assert training.result is not None
    assert training.has_gradients


def test_a_loop_of_its_own_is_noted_too() -> None:
    assert noted(Bare(), LocalPlan(steps=3)).doings.steps == 3


def test_settings_of_the_process_are_noted_and_restored() -> None:
    class Careless(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            result = super().train(model, plan)
            torch.set_grad_enabled(False)
            torch.rand(1)
            return result

    training = noted(Careless(), LocalPlan(steps=2))
    assert training.touched == ("torch's random generator", "whether torch records gradients")
    assert torch.is_grad_enabled()


def test_what_the_client_says_of_its_loss_is_passed_on() -> None:
    class Says(Ward):
        def training_loss(self, model: nn.Module) -> float | None:
            return 0.75

    assert ObservedClient(Says()).training_loss(Says().model) == 0.75
    assert ObservedClient(Ward()).training_loss(Ward().model) is None


def test_an_error_is_noted_and_passed_on() -> None:
    class Leaves(Ward):
        def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
            raise SystemExit(3)

    client = ObservedClient(Leaves())
    assert raised_by(lambda: client.train(client.model, LocalPlan(steps=2))) is client.trainings[0].error


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except SystemExit as error:
        return error
    return None
