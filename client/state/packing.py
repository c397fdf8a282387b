"""Nested values as JSON and tensors, for safetensors files: nothing is pickled.

Values that JSON cannot tell apart are spelled out: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`,
`{"tensor": "name"}`, and `{"array": "name"}` for an array of numpy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


class Packing:
    """Packs nested values as JSON and collects their tensors by name. Tied weights become one tensor."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def pack(self, value: object) -> Any:
        """`value` as JSON. Raises `TypeError` for a value of an unsupported type."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic():
                return value.item()
            case Tensor():
                return {"tensor": self._name_of(value.detach())}
            case np.ndarray():
                return {"array": self._name_of(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape))}
            case list():
                return [self.pack(item) for item in cast(list[object], value)]
            case tuple():
                return {"tuple": [self.pack(item) for item in cast(tuple[object, ...], value)]}
            case Mapping():
                pairs = cast(Mapping[object, object], value).items()
                return {"dict": [[self.pack(key), self.pack(item)] for key, item in pairs]}
            case _:
                kinds = "dicts, lists, tuples, tensors, arrays, numbers, texts and None"
                raise TypeError(f"a {type(value).__name__} cannot be kept on disk, only {kinds} can")

    def _name_of(self, tensor: Tensor) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = self._names.setdefault(place if tensor.numel() else (len(self.tensors),), str(len(self.tensors)))
        self.tensors.setdefault(name, tensor)
        return name


def unpack(packed: object, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack`, with these tensors. Raises `ValueError` for what `pack` does not write."""
    match packed:
        case None | bool() | int() | float() | str():
            return packed
        case list():
            return [unpack(item, tensors) for item in cast(Sequence[object], packed)]
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"array": str(name)} if name in tensors:
            return tensors[name].numpy()
        case {"tuple": [*items]}:
            return tuple(unpack(item, tensors) for item in items)
        case {"dict": [*pairs]}:
            return dict(_pair(pair, tensors) for pair in pairs)
        case _:
            raise ValueError("the stored values are malformed")


def _pair(pair: object, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    match pair:
        case [key, value]:
            return unpack(key, tensors), unpack(value, tensors)
        case _:
            raise ValueError("the stored values are malformed")
