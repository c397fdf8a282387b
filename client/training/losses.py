"""Losses by name, with the shapes that each takes and what it measures beside the loss.

Each is a mean over the batch, in nats where it is an entropy. They refuse shapes that torch would broadcast or
misread. An output (n, 1) beside a target (n,) is a frequent mistake: torch's mean squared error raises no error,
and the model learns nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # a target that does not count, as in torch
LossName = Literal["classes", "tokens", "one-logit", "multi-label", "regression"]
Loss = Callable[[Any, Any], Tensor]
Measure = Callable[[Any, Any], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss, and what is measured beside it: both of (output, target)."""

    loss: Loss
    measure: Measure


def classes(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy. `output`: logits (n, classes, ...). `target`: integers (n, ...), such as of an image's pixels."""
    if output.dim() < 2 or target.shape != output.shape[:1] + output.shape[2:]:
        raise ValueError(_shapes_differ("classes", output, target, "(n, classes, ...)", "(n, ...)"))
    return functional.cross_entropy(output, target, ignore_index=IGNORED)


def tokens(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of sequences. `output`: logits (n, length, tokens). `target`: integers (n, length)."""
    if output.dim() != 3 or target.shape != output.shape[:2]:
        raise ValueError(_shapes_differ("tokens", output, target, "(n, length, tokens)", "(n, length)"))
    return functional.cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED)


def one_logit(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy. `output`: logits (n,) or (n, 1). `target`: 0 or 1, any dtype, (n,) or (n, 1)."""
    logits, truth = _of_one("one-logit", output, target)
    return functional.binary_cross_entropy_with_logits(logits, truth)


def multi_label(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of several labels. `output`: logits (n, labels). `target`: 0 or 1, the same shape."""
    if output.shape != target.shape or output.dim() < 2:
        raise ValueError(_shapes_differ("multi-label", output, target, "(n, labels)", "(n, labels)"))
    return functional.binary_cross_entropy_with_logits(output, target.to(output.dtype))


def regression(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error. `output` and `target`: one shape, or (n, 1) and (n,)."""
    found, truth = output, target
    if output.dim() <= 2 and target.dim() == 1:
        found, truth = _of_one("regression", output, target)
    if found.shape != truth.shape:
        raise ValueError(_shapes_differ("regression", output, target, "(n, ...)", "(n, ...)"))
    return functional.mse_loss(found, truth.to(found.dtype))


def accuracy_of_classes(output: Any, target: Any) -> dict[str, Tensor]:
    """The accuracy where targets are classes and dimension 1 of outputs has one score a class, else nothing."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)) or target.is_floating_point():
        return {}
    if output.dim() < 2 or target.shape != output.shape[:1] + output.shape[2:]:
        return {}
    return {"accuracy": _share_right(output.argmax(dim=1), target)}


def _accuracy_of_tokens(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": _share_right(output.argmax(dim=2), target)}


def _accuracy_of_one_logit(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    logits, truth = _of_one("one-logit", output, target)
    return {"accuracy": ((logits > 0) == (truth > 0.5)).to(torch.float32).mean()}


def _accuracy_of_labels(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": ((output > 0) == (target > 0.5)).to(torch.float32).mean()}


def _nothing(_output: Any, _target: Any) -> dict[str, Tensor]:
    return {}


LOSSES: Mapping[str, NamedLoss] = MappingProxyType(
    {
        "classes": NamedLoss(classes, accuracy_of_classes),
        "tokens": NamedLoss(tokens, _accuracy_of_tokens),
        "one-logit": NamedLoss(one_logit, _accuracy_of_one_logit),
        "multi-label": NamedLoss(multi_label, _accuracy_of_labels),
        "regression": NamedLoss(regression, _nothing),
    }
)


def named_loss(name: str) -> NamedLoss:
    """Raises `ValueError` for a name that no loss has."""
    try:
        return LOSSES[name]
    except KeyError:
        raise ValueError(
            f"there is no loss {name!r}: take one of {', '.join(LOSSES)}, or a function of (output, target)"
        ) from None


def _share_right(said: Tensor, target: Tensor) -> Tensor:
    counted = target != IGNORED
    return (said == target)[counted].to(torch.float32).mean() if bool(counted.any()) else said.new_zeros(()).float()


def _of_one(name: str, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as (n,), the target in the output's dtype. `name`: of the loss."""
    n = len(output) if output.dim() else 0
    if output.shape not in ((n,), (n, 1)) or target.shape not in ((n,), (n, 1)):
        raise ValueError(_shapes_differ(name, output, target, "(n,) or (n, 1)", "(n,) or (n, 1)"))
    return output.reshape(-1), target.reshape(-1).to(output.dtype)


def _shapes_differ(name: str, output: Tensor, target: Tensor, wanted: str, beside: str) -> str:
    return (
        f"the loss {name!r} needs an output of shape {wanted} and a target of shape {beside}, but they have "
        f"{tuple(output.shape)} and {tuple(target.shape)}"
    )
