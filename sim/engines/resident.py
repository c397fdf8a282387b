"""A model that stays where it is while client after client trains it: reset in place, and read in place.

Every client begins with the global values of all that the state dict names, running statistics and counters included,
and with the buffers that it does not name as they were made. So nothing of one client reaches the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State, master_dtype, published, weight_change
from umbel.sim.engines.work import EngineError

_EXACT_IN_FLOAT32 = 1 << 24


def start_vector(layout: Layout, state: State) -> Tensor:
    """A model as the float32 vector that engines start from: values in layout order, integers as they are.

    Raises `EngineError` for an integer beyond 2^24, which float32 cannot carry.
    """
    vector = torch.empty(layout.n_values, dtype=torch.float32)
    for spec in layout.owners():
        values = state[spec.name].detach().reshape(-1)
        if not values.is_floating_point() and bool((values.to(torch.int64).abs() > _EXACT_IN_FLOAT32).any()):
            raise EngineError(
                f"integer tensor {spec.name!r} holds more than 2^24; the simulator cannot carry it exactly"
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
                f"{strange[0]!r} of the model's state dict is neither a parameter nor a buffer of its own"
            )
        self._owners = [(spec, places.get(spec.name)) for spec in self.layout.owners()]
        self._starts: list[Tensor] = []
        self._row = torch.empty(0 if self._device.type == "cpu" else self.layout.n_values, device=self._device)

    def set_start(self, start: Tensor) -> None:
        """From now on clients start from `start`: float32 (n_values,), on any device, not to be changed meanwhile."""
        here = start.to(self._device)
        self._starts = [published(s, here[s.place].to(master_dtype(s))).view(s.shape) for s, _ in self._owners]

    @torch.no_grad()
    def reset(self) -> None:
        """Make the model what clients start from."""
        for replaced in self._buffers:
            replaced.put_back()
        for unnamed, made in self._unnamed:
            unnamed.tensor.copy_(made)
        for (spec, buffer), start in zip(self._owners, self._starts, strict=True):
            (self._parameters[spec.name] if buffer is None else buffer.tensor).copy_(start)

    @torch.no_grad()
    def write_change(self, row: Tensor) -> None:
        """What has become of the model since `reset`, as `Layout.subtract` has it, into `row`: float32, on the CPU."""
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
    """A buffer under one of its names. `tensor`: the one that stays; a module may put another into its place."""

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
