"""How a model is made and its loss computed, as text, so that any process on any machine can make it for itself."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from umbel.sim.engines.work import EngineError

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """`outputs`: logits (n, classes); `targets`: int64 (n,), classes. In nats, (n,)."""
    return -functional.log_softmax(outputs, 1).gather(1, targets.unsqueeze(1)).squeeze(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of real numbers: `outputs` and `targets` of one shape (n, ...)."""
    return functional.mse_loss(outputs, targets, reduction="none")


LOSSES: Mapping[str, Loss] = MappingProxyType({"cross-entropy": cross_entropy, "squared-error": squared_error})


MeanLoss = Callable[[Any, Any], Tensor]

MEAN_LOSSES: Mapping[str, MeanLoss] = MappingProxyType(
    {"cross-entropy": functional.cross_entropy, "squared-error": functional.mse_loss}
)


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """`function`: `module:function` that returns the `nn.Module`, called with `arguments`, which JSON can carry.

    `loss`: one of `MEAN_LOSSES`, or `module:function` of (output, target): a mean over the batch, as a scalar. `seed`:
    of torch's generator while the model is made. Engines overwrite all that its state dict names; what it does not
    name, such as a table of positions, is as it was made.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loss: str = "cross-entropy"
    seed: int = 0

    def make(self) -> nn.Module:
        """A new model. Leaves torch's global generator as it was. Raises `EngineError` if nothing comes of it."""
        make = _named(self.function, "the model's function")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = make(**self.arguments)
        if not isinstance(model, nn.Module):
            raise EngineError(f"{self.function} returned a {type(model).__name__}; it must return a torch.nn.Module")
        return model

    def mean_loss(self) -> MeanLoss:
        """Raises `EngineError` for one that cannot be found."""
        return MEAN_LOSSES.get(self.loss) or _named(self.loss, "the loss")

    def to_json(self) -> str:
        """Raises `EngineError` for arguments that JSON cannot carry."""
        try:
            return json.dumps(asdict(self))
        except (TypeError, ValueError) as error:
            raise EngineError(
                f"the arguments of {self.function} cannot be sent to another process ({error}); "
                "give it numbers, texts, lists and tables only"
            ) from error

    @classmethod
    def from_json(cls, text: str) -> "ModelRecipe":
        return cls(**json.loads(text))


def _named(name: str, what: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise EngineError(f"{what} must look like module:function, such as my_models:small_net, not {name!r}")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there, but imports something that is not
        raise EngineError(
            f"no module {module_name!r} to take {what} from; start in the folder that holds it, or install it"
        ) from error
    if not callable(found):
        raise EngineError(f"{module_name!r} has no function {attribute!r} to take {what} from")
    return found  # type: ignore[no-any-return]  # what it returns is checked where it is called
