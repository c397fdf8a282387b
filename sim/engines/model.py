"""The model that engines train: how any process makes it, and how it is reset and read for client after client.

A recipe is text, so that a process on any machine can make the model and its loss. A resident model stays in memory.
Every client begins with the global values of all that the state dict names, running statistics and counters included,
and with the unnamed buffers as they were made, so nothing of one client reaches the next.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State, master_dtype, published, weight_change
from umbel.sim.engines.work import EngineError
from umbel.sim.given import only_here, why_only_here

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
    """How to make a model. Engines overwrite all that its state dict names; other buffers stay as they were made."""

    function: str  # "module:function" that returns the `nn.Module`
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # as JSON can carry them
    loss: str = "cross-entropy"  # one of `MEAN_LOSSES`, or "module:function" of (output, target): the batch's mean
    seed: int = 0  # of torch's generator while the model is made

    def make(self) -> nn.Module:
        """A new model. Leaves torch's global generator unchanged. Raises `EngineError` if it cannot be made."""
        make = _named(self.function, "the model's function")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = make(**self.arguments)
        if not isinstance(model, nn.Module):
            raise EngineError(f"{self.function} returned a {type(model).__name__}; it must return a torch.nn.Module")
        return model

    def mean_loss(self) -> MeanLoss:
        """Raises `EngineError` for a loss that cannot be found."""
        return MEAN_LOSSES.get(self.loss) or _named(self.loss, "the loss")

    @property
    def is_only_here(self) -> bool:
        """Whether other processes cannot import its code."""
        return only_here(asdict(self)) is not None

    def to_json(self) -> str:
        """Raises `EngineError` for a model that another process cannot make, or arguments that JSON cannot carry."""
        if (name := only_here(asdict(self))) is not None:
            raise EngineError(f'{why_only_here(name)}; or set name = "sequential" or "threads" in [engine]')
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
            raise  # the module exists and imports one that does not
        raise EngineError(
            f"there is no module {module_name!r}, which {what} needs; run this in the folder that holds the module, or "
            "install it"
        ) from error
    if not callable(found):
        raise EngineError(f"module {module_name!r} has no function {attribute!r}, which {what} needs")
    return found  # type: ignore[no-any-return]  # its caller checks what it returns


_EXACT_IN_FLOAT32 = 1 << 24


def start_vector(layout: Layout, state: State) -> Tensor:
    """A model as the float32 vector that engines start from, in layout order.

    Raises `EngineError` for an integer beyond 2^24, which float32 cannot carry.
    """
    vector = torch.empty(layout.n_values, dtype=torch.float32)
    for spec in layout.owners():
        values = state[spec.name].detach().reshape(-1)
        if not values.is_floating_point() and bool((values.to(torch.int64).abs() > _EXACT_IN_FLOAT32).any()):
            raise EngineError(
                f"integer tensor {spec.name!r} has a value beyond 2^24, which the simulator (float32) cannot hold "
                "exactly"
            )
        vector[spec.place] = values.to("cpu", torch.float32)
    return vector


class ResidentModel:
    """`module` on its device, in training mode. `layout`: of its state dict."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.train()
        state = module.state_dict()
        self.layout = Layout.of_state(state)
        self._device = next(iter(state.values())).device if state else torch.device("cpu")
        self._buffers = list(_buffers(module))
        self._parameters = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
        self._unnamed = [(buffer, buffer.tensor.clone()) for buffer in self._buffers if buffer.name not in state]
        places = {buffer.name: buffer for buffer in self._buffers}
        if strange := [s.name for s in self.layout.owners() if s.name not in self._parameters and s.name not in places]:
            raise EngineError(
                f"{strange[0]!r} in the model's state dict is neither a parameter nor a buffer of the model; the "
                "simulator supports no other entries"
            )
        self._owners = [(spec, places.get(spec.name)) for spec in self.layout.owners()]
        self._starts: list[Tensor] = []
        self._row = torch.empty(0 if self._device.type == "cpu" else self.layout.n_values, device=self._device)

    def set_start(self, start: Tensor) -> None:
        """Have clients start from `start`: float32 (n_values,), on any device; it must not change meanwhile."""
        here = start.to(self._device)
        self._starts = [published(s, here[s.place].to(master_dtype(s))).view(s.shape) for s, _ in self._owners]

    @torch.no_grad()
    def reset(self) -> None:
        """Set the model to what clients start from."""
        for replaced in self._buffers:
            replaced.put_back()
        for unnamed, made in self._unnamed:
            unnamed.tensor.copy_(made)
        for (spec, buffer), start in zip(self._owners, self._starts, strict=True):
            (self._parameters[spec.name] if buffer is None else buffer.tensor).copy_(start)

    def named(self, values: Tensor) -> dict[str, Tensor]:
        """Views of values in layout order, (n_values,), by the names of their tensors."""
        return {spec.name: values[spec.place].view(spec.shape) for spec, _ in self._owners}

    @torch.no_grad()
    def write_change(self, row: Tensor) -> None:
        """Write the change since `reset` into `row`, as `Layout.subtract` does: float32, on the CPU."""
        out = row if self._device.type == "cpu" else self._row
        for (spec, buffer), start in zip(self._owners, self._starts, strict=True):
            local = self._parameters[spec.name] if buffer is None else buffer.now
            place = out[spec.place].view(spec.shape)
            if spec.dtype == "float32":
                torch.sub(local, start, out=place)
            else:
                place.copy_(weight_change(spec, local, start))
        if out is not row:
            row.copy_(out)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer under one of its names. `tensor`: the resident one, which a module may replace by another."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor

    @property
    def now(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.key)
        return found

    def put_back(self) -> None:
        if self.now is not self.tensor:
            setattr(self.owner, self.key, self.tensor)


def _buffers(module: nn.Module) -> Iterator[_Buffer]:
    for name, tensor in module.named_buffers(remove_duplicate=False):
        prefix, _, key = name.rpartition(".")
        yield _Buffer(name, module.get_submodule(prefix), key, tensor)
