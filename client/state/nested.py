"""Nested state, such as an optimizer's, as JSON and named tensors; unpickling nothing, and giving back the same values.

What JSON cannot tell apart is spelled out: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`, `{"tensor": "name"}`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor


class Packing:
    """Collects the tensors of what it packs. `tensors`: by name; equal places in memory (tied weights) are one."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def pack(self, value: object) -> Any:
        """`value` as JSON. Raises `TypeError` for what has no spelling here."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic():
                return value.item()
            case Tensor():
                return {"tensor": self._name_of(value.detach())}
            case list():
                return [self.pack(item) for item in cast(list[object], value)]
            case tuple():
                return {"tuple": [self.pack(item) for item in cast(tuple[object, ...], value)]}
            case Mapping():
                pairs = cast(Mapping[object, object], value).items()
                return {"dict": [[self.pack(key), self.pack(item)] for key, item in pairs]}
            case _:
                raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint")

    def _name_of(self, tensor: Tensor) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = self._names.setdefault(place if tensor.numel() else (len(self.tensors),), str(len(self.tensors)))
        self.tensors.setdefault(name, tensor)
        return name


def unpack(packed: object, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack`, with these tensors in it. Raises `ValueError` for what `pack` has not written."""
    match packed:
        case None | bool() | int() | float() | str():
            return packed
        case list():
            return [unpack(item, tensors) for item in cast(Sequence[object], packed)]
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"tuple": [*items]}:
            return tuple(unpack(item, tensors) for item in items)
        case {"dict": [*pairs]}:
            return dict(_pair(pair, tensors) for pair in pairs)
        case _:
            raise ValueError("the nested state is not in the form it is written in")


def _pair(pair: object, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    match pair:
        case [key, value]:
            return unpack(key, tensors), unpack(value, tensors)
        case _:
            raise ValueError("the nested state is not in the form it is written in")
