"""Nested values as JSON and tensors, for safetensors files: nothing is pickled.

Values that JSON cannot tell apart are spelled out: `{"tuple": [...]}`, `{"dict": [[key, value], ...]}`,
`{"tensor": "name"}`, and `{"array": "name"}` for an array of numpy.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

DEPTH_MAX = 100  # of values in values; Python's own limit would be met at about three times this number


class Packing:
    """Packs nested values as JSON and collects their tensors by name. Tied weights become one tensor."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def pack(self, value: object, depth: int = 0) -> Any:
        """`value` as JSON. Raises `TypeError` for a value of an unsupported type, `ValueError` for one in too many
        others, such as a dict that holds itself.
        """
        if depth > DEPTH_MAX:
            raise ValueError(f"a value lies in more than {DEPTH_MAX} others; nest less, and let no value hold itself")
        within = partial(self.pack, depth=depth + 1)
        match value:
            case None | bool() | int() | float() | str():
                return value
            case np.generic():
                return value.item()
            case Tensor() if value.layout is not torch.strided or value.is_meta:
                raise TypeError("a sparse tensor, or one without values, cannot be kept on disk: make it dense")
            case Tensor():
                return {"tensor": self._name_of(value.detach())}
            case np.ndarray():
                return {"array": self._name_of(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape))}
            case list():
                return [within(item) for item in cast(list[object], value)]
            case tuple():
                return {"tuple": [within(item) for item in cast(tuple[object, ...], value)]}
            case Mapping():
                pairs = cast(Mapping[object, object], value).items()
                return {"dict": [[within(key), within(item)] for key, item in pairs]}
            case _:
                kinds = "dicts, lists, tuples, tensors, arrays, numbers, texts and None"
                raise TypeError(f"a {type(value).__name__} cannot be kept on disk, only {kinds} can")

    def separate(self) -> dict[str, Tensor]:
        """The tensors as safetensors takes them: contiguous, and with no memory in common. A part of another tensor is
        copied.
        """
        taken: dict[int, list[range]] = {}  # by storage
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            whole = tensor.contiguous()
            place = range(whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size())
            others = taken.setdefault(whole.untyped_storage().data_ptr(), [])
            found[name] = whole.clone() if any(_overlap(place, one) for one in others) else whole
            others.append(place)
        return found

    def _name_of(self, tensor: Tensor) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = self._names.setdefault(place if tensor.numel() else (len(self.tensors),), str(len(self.tensors)))
        self.tensors.setdefault(name, tensor)
        return name


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


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
