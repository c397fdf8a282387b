"""Named numpy arrays as a model and as data, for training in scikit-learn, JAX, TensorFlow and other frameworks."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from umbel.aggregation.model.layout import DTYPES, STATISTICS

Array: TypeAlias = npt.NDArray[Any]
NamedArrays: TypeAlias = Mapping[str, npt.ArrayLike]
"""Arrays by name. Anything that `numpy.asarray` takes is an array, such as JAX's and TensorFlow's."""


class ArrayData(Dataset[tuple[Any, ...]]):
    """Samples as arrays of one length: sample i is `(array[i], ...)`. `plan.drive` gives a batch as a tuple of arrays.

    A subclass may give samples of its own, such as augmented ones: its `__getitem__` is then called with one number
    for each sample.

    Raises `ValueError` for arrays without a first dimension, or of different lengths.
    """

    def __init__(self, *arrays: npt.ArrayLike) -> None:
        self.arrays: tuple[Array, ...] = tuple(np.asarray(one) for one in arrays)
        shapes = [one.shape for one in self.arrays]
        if not shapes or not all(shape and shape[0] == shapes[0][0] for shape in shapes):
            raise ValueError(
                f"the arrays of a data set have the shapes {', '.join(map(str, shapes)) or '(none)'}: give at least "
                "one array, and all with the same first dimension, which counts the samples"
            )

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, chosen: int | Array) -> tuple[Any, ...]:
        return tuple(one[chosen] for one in self.arrays)


class _Branch(nn.Module):
    """The tensors whose names begin with one prefix. torch's own `register_...` refuses names such as `type`."""

    def _put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Dots in its name lead through further branches, because torch reads names so."""
        first, dot, rest = name.partition(".")
        if dot:
            branch = self._modules.setdefault(first, _Branch())
            assert isinstance(branch, _Branch)
            branch._put(rest, tensor)
        elif tensor.is_floating_point() and name not in STATISTICS:
            self._parameters[name] = nn.Parameter(tensor)
        else:
            self._buffers[name] = tensor


class ArrayModel(_Branch):
    """A model whose tensors are these arrays, for a `Client` that trains them with another framework than torch.

    Floating-point arrays are parameters. Integers, bools and arrays that are named as the running statistics of
    normalization layers are buffers. Any text may be a name.

    Args:
        arrays: the first values.
        dtypes: of tensors that have another dtype than their array, such as bfloat16, which numpy does not have.

    Raises `TypeError` for a name that is no text, `ValueError` for a dtype that no model can have.
    """

    def __init__(self, arrays: NamedArrays, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})) -> None:
        super().__init__()
        self._dtypes: dict[str, np.dtype[Any]] = {}
        for name, value in arrays.items():
            array = np.asarray(value)
            if not isinstance(cast(object, name), str) or not name:
                raise TypeError(f"the name of an array must be a text that is not empty, not {name!r:.80}")
            self._dtypes[name] = array.dtype
            tensor = tensor_of(array, name)
            self._put(name, tensor.to(dtypes.get(name, tensor.dtype), copy=True))

    def arrays(self) -> dict[str, Array]:
        """Copies of the arrays as they are now, in the order and with the dtypes of the first values."""
        state = self.state_dict()
        return {
            name: array_of(state[name].to(getattr(torch, dtype.name)), dtype) for name, dtype in self._dtypes.items()
        }

    def set_arrays(self, arrays: NamedArrays) -> None:
        """Overwrite all arrays. Raises `ValueError` for other names, shapes or dtypes, or values that are not finite;
        nothing has changed then.
        """
        state = self.state_dict()
        if lost := [name for name in state if name not in arrays]:
            raise ValueError(
                f"array {lost[0]!r} is missing, which the model has with the shape {_shape(state[lost[0]])}"
            )
        if extra := [name for name in arrays if name not in state]:
            raise ValueError(f"array {extra[0]!r:.200} is not one of the model's: {', '.join(state)[:500]}")
        found = {name: self._fitting(name, value, state[name]) for name, value in arrays.items()}
        for name, tensor in found.items():
            state[name].copy_(tensor)

    def _fitting(self, name: str, value: npt.ArrayLike, old: Tensor) -> Tensor:
        new = tensor_of(value, name)
        if new.shape != old.shape or new.dtype != getattr(torch, self._dtypes[name].name):
            raise ValueError(
                f"array {name!r} has the shape {_shape(new)}, but the model's has "
                f"{self._dtypes[name]}{list(old.shape)}: return it with the shape and dtype of the model"
            )
        if new.is_floating_point() and not bool(torch.isfinite(new.to(old.dtype)).all()):
            raise ValueError(
                f"array {name!r} with the shape {_shape(new)} holds a NaN or an infinity: check the data, then try a "
                "smaller learning rate"
            )
        return new


def tensor_of(value: npt.ArrayLike, name: str) -> Tensor:
    """An array as a tensor of the same dtype, on the CPU. It may share the array's memory.

    Raises `ValueError` for a dtype that no model can have. bfloat16 is the dtype of that name in the package ml_dtypes.
    """
    array = np.asarray(value)
    if array.dtype.name not in DTYPES:
        raise ValueError(
            f"array {name!r} has dtype {array.dtype}, which cannot be averaged: convert it to one of "
            f"{', '.join(sorted(DTYPES))}"
        )
    native = np.array(array, array.dtype.newbyteorder("="), order="C", copy=None)
    if not native.flags.writeable:  # torch warns of memory that it may not write to
        native = native.copy()
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(native.reshape(-1).view(np.uint8)).view(dtype).reshape(native.shape)


def array_of(tensor: Tensor, dtype: np.dtype[Any]) -> Array:
    """A tensor as a new array of `dtype`, which must have the same name as the tensor's dtype."""
    values = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
    return values.view(dtype.newbyteorder("=")).reshape(tuple(tensor.shape))


def require_gradient(name: str, gradient: Tensor, weight: Tensor | None) -> None:
    """Raise `ValueError` for a gradient that cannot be one of `weight`."""
    if weight is None:
        raise ValueError(f"there is a gradient of array {name!r}, but the weights have no array of this name")
    if gradient.shape != weight.shape or not weight.is_floating_point():
        raise ValueError(
            f"the gradient of array {name!r} has the shape {_shape(gradient)}, and the array {_shape(weight)}: a "
            "gradient needs the shape of its array, and only floating-point arrays have one"
        )


def _shape(tensor: Tensor) -> str:
    """Such as float32[3, 2]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
