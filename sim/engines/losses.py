"""The losses that an experiment's file can name, of each sample: what the SDK's trainer takes the mean of."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """`outputs`: logits (n, classes); `targets`: int64 (n,), classes. In nats, (n,)."""
    return -functional.log_softmax(outputs, 1).gather(1, targets.unsqueeze(1)).squeeze(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of real numbers: `outputs` and `targets` of one shape (n, ...)."""
    return functional.mse_loss(outputs, targets, reduction="none")


LOSSES: Mapping[str, Loss] = MappingProxyType({"cross-entropy": cross_entropy, "squared-error": squared_error})
