"""The layers of a model in the order in which a step calls them, and the work of each: counted, not timed.

The work is what torch's counter counts: floating-point operations of matrix products, convolutions and attention,
forward and backward. So it is the same in each run, also on processors that others use. What the counter does not know
has no work, such as an LSTM on a GPU.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.hooks import RemovableHandle

_MOST = 0.5  # a module with more of the work than that is looked into
_Named: TypeAlias = tuple[str, nn.Module]
_Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer needs."""

    name: str  # in the model, such as "layers.3"
    flops: int  # of one step
    parameter_bytes: int


class CountedStep:
    """Counts the work of all modules of `model` while one step is made inside of this block."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counter = FlopCounterMode(display=False, custom_mapping=_ON_PROCESSORS)
        self._had_mkldnn = False
        self._first_calls = dict[nn.Module, int]()
        self._handles = list[RemovableHandle]()

    def __enter__(self) -> "CountedStep":
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._note))
        # The LSTM of mkldnn is one operation, which the counter does not know. Without it, an LSTM is matrix products.
        self._had_mkldnn, _mkldnn.enabled = _mkldnn.enabled, False
        self._counter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counter.__exit__(kind, error, trace)
        _mkldnn.enabled = self._had_mkldnn
        for one in self._handles:
            one.remove()

    @property
    def flops(self) -> int:
        """Of all that was done, in the model or not."""
        return int(self._counter.get_total_flops())

    def layers(self) -> list[LayerCost]:
        """The layers that could be divided into stages, in the order of their first calls.

        These are the model's children, where a Sequential, a ModuleList or a ModuleDict counts as its own children. Is
        a child of another kind most of the work, and most of this work is in a ModuleList, then the child counts as its
        children too: the blocks of a transformer.
        """
        found = [*_flat("", self._model.named_children())] or [("", self._model)]
        while (one := self._trunk_among(found)) is not None:
            place = found.index(one)
            found[place : place + 1] = _flat(one[0], one[1].named_children())
        return [
            LayerCost(
                name or type(module).__name__, self._flops_of(name), sum(one.nbytes for one in module.parameters())
            )
            for name, module in self._in_order(found)
        ]

    def _trunk_among(self, layers: Sequence[_Named]) -> _Named | None:
        """A layer that is to be replaced by its children; None if all can stay."""
        for name, module in layers:
            work = self._flops_of(name)
            lists = [
                f"{name}.{path}"
                for path, one in module.named_modules()
                if isinstance(one, nn.ModuleList) and len(one) > 1
            ]
            # A ModuleList is never called itself, so its work is that of the modules in it.
            if work > _MOST * self._flops_of("") and any(self._inside(one) > _MOST * work for one in lists):
                return name, module
        return None

    def _inside(self, path: str) -> int:
        """The work of the children of this module."""
        return sum(self._flops_of(f"{path}.{name}") for name, _ in self._model.get_submodule(path).named_children())

    def _flops_of(self, name: str) -> int:
        """The counter names modules by the class of the outermost one that is called."""
        root = type(self._model).__name__
        return sum(self._counter.flop_counts.get(f"{root}.{name}" if name else root, _NONE).values())

    def _in_order(self, layers: Sequence[_Named]) -> list[_Named]:
        """By first calls. A layer that was not called keeps its place after the one before it."""
        keys, last = list[int](), -1
        for _, module in layers:
            last = self._first_calls.get(module, last)
            keys.append(last)
        return [layers[i] for i in sorted(range(len(layers)), key=keys.__getitem__)]

    def _note(self, module: nn.Module, _inputs: Any) -> None:
        self._first_calls.setdefault(module, len(self._first_calls))


_NONE: dict[Any, int] = {}
_mkldnn: Any = torch.backends.mkldnn  # its types do not say that flags can be set


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


# Torch's counter knows the attention of GPUs only.
_ON_PROCESSORS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _flat(name: str, children: Iterable[_Named]) -> list[_Named]:
    """These children of the module `name`, with containers replaced by what they contain."""
    found = list[_Named]()
    for own, module in children:
        path = f"{name}.{own}" if name else own
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            found += _flat(path, module.named_children())
        else:
            found.append((path, module))
    return found
