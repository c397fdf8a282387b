"""LARS and LAMB step as their papers say, and as published code does."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from umbel.client.local.large_batch import Lamb, Lars
from umbel.client.local.optimizers import optimizer_of
from umbel.client.local.plan import LocalPlan

N_STEPS, RATE, DECAY = 3, 0.5, 0.01
Made = Callable[[list[nn.Parameter]], Optimizer]

# After three steps of `pytorch_optimizer` 4.1.0 (https://github.com/kozistr/pytorch_optimizer, Apache 2.0) on torch
# 2.13, in float32: LARS(lr=0.5, weight_decay=0.01, momentum=0.9, trust_coefficient=0.1, foreach=False) and
# Lamb(lr=0.05, eps=1e-6, adam_debias=True, foreach=False). Its LAMB adapts vectors too, so only the matrix is compared.
PUBLISHED_LARS = [
    [[-0.1315712, 0.82308185], [0.9547528, 0.20029731], [-0.59411621, -0.9561432]],
    [-0.25404608, -1.5342832, -1.4039077],
]
PUBLISHED_LAMB = [[-0.13481636, 0.83371866], [0.98019415, 0.18745023], [-0.5969072, -1.0258433]]


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix and a vector."""
    return [
        nn.Parameter(torch.arange(6, dtype=dtype).sin().view(3, 2)),
        nn.Parameter(torch.arange(3, dtype=dtype).cos()),
    ]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    first, second = torch.arange(6, dtype=dtype), torch.arange(3, dtype=dtype)
    return [(first * (step + 1) + step).cos().view(3, 2), (second + step).sin()]


def moved(make: Made, dtype: torch.dtype = torch.float32, n_steps: int = N_STEPS) -> list[Tensor]:
    """The weights after some steps."""
    found = weights(dtype)
    optimizer = make(found)
    for step in range(n_steps):
        for one, gradient in zip(found, gradients(step, dtype), strict=True):
            one.grad = gradient
        optimizer.step()
    return [one.detach() for one in found]


def length(values: Tensor) -> float:
    return math.sqrt(sum(value * value for value in values.flatten().tolist()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_is_algorithm_1_of_its_paper(momentum: float) -> None:
    found = moved(lambda p: Lars(p, RATE, momentum, DECAY, trust=0.1), torch.float64)
    matrix, vector = (one.detach().clone() for one in weights(torch.float64))
    of_matrix, of_vector = torch.zeros_like(matrix), torch.zeros_like(vector)
    for step in range(N_STEPS):
        to_matrix, to_vector = gradients(step, torch.float64)
        rate = 0.1 * length(matrix) / (length(to_matrix) + DECAY * length(matrix))
        of_matrix = momentum * of_matrix + RATE * rate * (to_matrix + DECAY * matrix)
        of_vector = momentum * of_vector + RATE * to_vector
        matrix, vector = matrix - of_matrix, vector - of_vector
    torch.testing.assert_close(found, [matrix, vector], rtol=1e-12, atol=1e-13)


def test_lamb_is_algorithm_2_of_its_paper() -> None:
    found = moved(lambda p: Lamb(p, RATE, weight_decay=DECAY), torch.float64)
    expected = [one.detach().clone() for one in weights(torch.float64)]
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in expected]
    for step in range(N_STEPS):
        for i, gradient in enumerate(gradients(step, torch.float64)):
            first, second = moments[i]
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            moments[i] = first, second
            ratio = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)
            if i == 0:  # the matrix
                ratio = ratio + DECAY * expected[i]
                ratio = ratio * length(expected[i]) / length(ratio)
            expected[i] = expected[i] - RATE * ratio
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_steps_are_those_of_published_code() -> None:
    lars = moved(lambda p: Lars(p, RATE, 0.9, DECAY, trust=0.1))
    torch.testing.assert_close(lars, [torch.tensor(one) for one in PUBLISHED_LARS], rtol=0, atol=1e-5)
    lamb = moved(lambda p: Lamb(p, 0.05))
    torch.testing.assert_close(lamb[0], torch.tensor(PUBLISHED_LAMB), rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [lambda p: Lars(p, RATE, 0.0, DECAY), lambda p: Lamb(p, RATE)], ids=["lars", "lamb"])
def test_weights_of_zeros_and_gradients_of_zeros_take_a_finite_step(make: Made) -> None:
    zeros, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = make([zeros, still])
    zeros.grad, still.grad = torch.ones(3, 2), torch.zeros(3, 2)
    optimizer.step()
    torch.testing.assert_close(zeros.detach(), torch.full((3, 2), -RATE), rtol=1e-5, atol=0)
    assert torch.isfinite(still).all()
    unused = nn.Parameter(torch.ones(2, 2))
    make([unused]).step()
    assert torch.equal(unused, torch.ones(2, 2))


def test_norms_of_weights_in_half_precision_are_taken_in_float32() -> None:
    """The square of 300 is beyond float16."""
    weights = nn.Parameter(torch.full((4, 4), 300.0, dtype=torch.float16))
    weights.grad = torch.full((4, 4), 300.0, dtype=torch.float16)
    Lars([weights], lr=1.0, momentum=0.0, trust=0.5).step()
    torch.testing.assert_close(weights.detach(), torch.full((4, 4), 150.0, dtype=torch.float16))


class _Text(nn.Module):
    """An embedding, a hidden matrix with a bias, a convolution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.convolution, self.head = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.hidden(self.words(words)).relu()
        found: Tensor = self.head(self.convolution(hidden.transpose(1, 2)).transpose(1, 2))
        return found


def text_steps(optimizer: Optimizer, model: nn.Module, n_steps: int = 2) -> None:
    for step in range(n_steps):
        words = torch.randint(5, (8, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).transpose(1, 2), words.roll(-1, 1)).backward()
        optimizer.step()


def text() -> _Text:
    torch.manual_seed(1)
    return _Text()


def of_run_file(model: nn.Module, **terms: Any) -> Optimizer:
    return optimizer_of(LocalPlan(learning_rate=0.1, weight_decay=0.1, **terms), model)


def test_muon_takes_the_hidden_matrices_and_adamw_all_else_as_torch_does() -> None:
    model, expected = text(), text()
    text_steps(of_run_file(model, optimizer="muon"), model)
    muon = torch.optim.Muon([expected.hidden.weight], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    others = [one for name, one in expected.named_parameters() if name != "hidden.weight"]
    adamw = torch.optim.AdamW(others, lr=0.1, weight_decay=0.1)

    def others_too(*_: object) -> None:
        adamw.step()
        adamw.zero_grad()

    muon.register_step_post_hook(others_too)
    text_steps(muon, expected)
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("name", ["lars", "lamb", "muon"])
def test_an_optimizer_goes_on_from_its_state_and_follows_a_schedule(name: Any) -> None:
    def trained(stops: bool) -> _Text:
        model = text()
        optimizer = of_run_file(model, optimizer=name)
        for i in range(2):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (i + 1)
            text_steps(optimizer, model)
            if stops:
                state = optimizer.state_dict()
                optimizer = of_run_file(model, optimizer=name)
                optimizer.load_state_dict(state)
        return model

    for one, other in zip(trained(stops=True).parameters(), trained(stops=False).parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["lars", "lamb", "muon"])
def test_a_step_computes_the_loss_by_a_closure_that_has_gradients(name: Any) -> None:
    model, expected = text(), text()
    words = torch.zeros(2, 6, dtype=torch.int64)

    def loss() -> Any:
        found = model(words).square().mean()
        found.backward()
        return found.detach()

    assert of_run_file(model, optimizer=name).step(loss) == expected(words).square().mean()
    assert all(
        not torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True)
    )


def test_a_model_without_hidden_matrices_is_trained_by_adamw_alone() -> None:
    model, expected = nn.Linear(3, 2), nn.Linear(3, 2)
    expected.load_state_dict(model.state_dict())
    for one, optimizer in (
        (model, of_run_file(model, optimizer="muon")),
        (expected, torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0.1)),
    ):
        one(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, expected.weight)
