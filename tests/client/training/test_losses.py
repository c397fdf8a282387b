"""Losses by name: torch's values in the shapes that each takes, and a refusal of shapes that torch would broadcast."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from umbel.client.training.losses import LOSSES, named_loss

N = 6


def logits(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def integers(n: int, *shape: int) -> Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(2))


def test_classes_are_cross_entropy_also_of_pixels() -> None:
    loss = LOSSES["classes"]
    assert torch.equal(loss.loss(logits(N, 4), integers(4, N)), functional.cross_entropy(logits(N, 4), integers(4, N)))
    output, target = logits(N, 3, 5, 5), integers(3, N, 5, 5)
    target[:, 0] = -100
    counted = target != -100
    assert torch.equal(loss.loss(output, target), functional.cross_entropy(output, target))
    right = (output.argmax(1) == target)[counted].float().mean()
    assert torch.equal(loss.measure(output, target)["accuracy"], right)


def test_tokens_are_cross_entropy_over_all_places_that_count() -> None:
    output, target = logits(N, 7, 5), integers(5, N, 7)
    target[0, 3:] = -100
    flat = functional.cross_entropy(output.reshape(-1, 5), target.reshape(-1))
    torch.testing.assert_close(LOSSES["tokens"].loss(output, target), flat)


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
@pytest.mark.parametrize("of_target", [(N,), (N, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_one_logit_takes_a_column_or_a_row(
    shape: tuple[int, ...], of_target: tuple[int, ...], dtype: torch.dtype
) -> None:
    output, truth = logits(N), integers(2, N)
    found = LOSSES["one-logit"].loss(output.view(shape), truth.view(of_target).to(dtype))
    assert torch.equal(found, functional.binary_cross_entropy_with_logits(output, truth.float()))
    accuracy = LOSSES["one-logit"].measure(output.view(shape), truth.view(of_target).to(dtype))["accuracy"]
    assert accuracy == ((output > 0) == truth.bool()).float().mean()


def test_labels_are_counted_one_by_one() -> None:
    output, target = logits(N, 3), integers(2, N, 3)
    assert torch.equal(
        LOSSES["multi-label"].loss(output, target), functional.binary_cross_entropy_with_logits(output, target.float())
    )
    assert LOSSES["multi-label"].measure(output, target)["accuracy"] == ((output > 0) == (target > 0)).float().mean()


def test_a_regression_of_a_column_beside_a_row_is_not_broadcast() -> None:
    output, target = logits(N, 1), logits(N)
    assert torch.equal(LOSSES["regression"].loss(output, target), functional.mse_loss(output.view(-1), target))
    assert LOSSES["regression"].measure(output, target) == {}


@pytest.mark.parametrize(
    ("name", "output", "target"),
    [
        ("classes", logits(N, 4), integers(4, N, 1)),
        ("tokens", logits(N, 5, 7), integers(5, N, 7)),
        ("one-logit", logits(N, 2), integers(2, N)),
        ("multi-label", logits(N, 3), integers(2, N)),
        ("regression", logits(N, 2), logits(N)),
        ("regression", logits(N, 2), logits(2, N)),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_both(name: str, output: Tensor, target: Tensor) -> None:
    with pytest.raises(ValueError, match=f"the loss '{name}' needs an output of shape .*, but they have"):
        LOSSES[name].loss(output, target)


def test_a_wrong_name_is_told_the_right_ones() -> None:
    with pytest.raises(ValueError, match="there is no loss 'mse': take one of classes, tokens, one-logit"):
        named_loss("mse")
