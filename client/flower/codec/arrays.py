"""Flower's arrays as a model of umbel's: its layout, the change between two of them, and the model after a change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord
from torch import Tensor

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.layout import FLOATS, PIECE_VALUES, Layout, TensorSpec
from umbel.aggregation.model.next_model import HasMean, ServerStep, write_next
from umbel.aggregation.model.state import InMemory, empty_state, master_of, torch_dtype, weight_change
from umbel.client.local.arrays import Array, array_of, tensor_of


@dataclass(frozen=True)
class StartArrays:
    """The arrays that clients train from, by name, as they came. They are unpacked when they are needed.

    Every name has values of its own, also if the app's model ties two of them, because Flower sends each.
    """

    arrays: Mapping[str, FlowerArray] = field(repr=False)

    @classmethod
    def of(cls, record: ArrayRecord) -> "StartArrays":
        """Those of a record, whatever becomes of the record itself."""
        return cls(dict(record))

    @cached_property
    def layout(self) -> Layout:
        """Raises `ValueError` for a dtype that no model can have."""
        return Layout.of_state({name: self._tensor(name) for name in self.arrays})

    def changes(self, local: ArrayRecord) -> Iterator[Tensor]:
        """The change from these arrays to `local`: float32, in the order of the layout, in pieces.

        Raises `LayoutError` for other names or shapes, or for dtypes that cannot take the place of these.
        """
        _require_names(self.layout, local)
        for spec in self.layout.owners():
            before = self.arrays[spec.name].numpy()
            new = _fitting(spec, local[spec.name].numpy(), before.dtype)
            change = weight_change(spec, new.reshape(-1), tensor_of(before, spec.name).reshape(-1))
            yield from torch.split(change, PIECE_VALUES)

    def moved(self, change: HasMean) -> ArrayRecord:
        """These arrays after a change: the same names in the same order, the same shapes and dtypes.

        Raises `ModelOverflow` for a float that would leave its dtype's finite range.
        """
        after = empty_state(self.layout, torch_dtype)
        write_next(self.layout, InMemory(self._master), change, ServerStep(), InMemory(after))
        dtypes = {spec.name: np.dtype(spec.dtype) for spec in self.layout.tensors}
        return ArrayRecord({name: FlowerArray(array_of(after.pop(name), dtypes[name])) for name in self.arrays})

    @cached_property
    def _master(self) -> dict[str, Tensor]:
        """Kept, because a strategy moves from the same arrays for each reply."""
        return master_of(self.layout, {name: self._tensor(name) for name in self.arrays})

    def _tensor(self, name: str) -> Tensor:
        return tensor_of(self.arrays[name].numpy(), name)


class FirstDtypes:
    """Keeps the dtypes of the first model of a run.

    Flower's means of integers are floats. As a float, a counter would be rounded together with the weights, and its
    change would dwarf theirs.
    """

    def __init__(self) -> None:
        self._dtypes = dict[str, str]()

    def kept(self, record: ArrayRecord) -> ArrayRecord:
        """The record itself, or one whose arrays have the dtypes in which arrays of these names came first.

        Raises `ValueError` for a value that is not finite where an integer is wanted.
        """
        for name, array in record.items():
            self._dtypes.setdefault(name, array.dtype)
        if all(array.dtype == self._dtypes[name] for name, array in record.items()):
            return record
        return ArrayRecord({name: self._kept(name, array) for name, array in record.items()})

    def _kept(self, name: str, array: FlowerArray) -> FlowerArray:
        if array.dtype == (dtype := self._dtypes[name]):
            return array
        return FlowerArray(np.asarray(_as_dtype(name, array.numpy(), np.dtype(dtype))))


def _as_dtype(name: str, values: Array, dtype: np.dtype[Any]) -> Array:
    """Floats become the nearest integer, a bool by majority, and what is beyond a dtype its greatest value."""
    if values.dtype.kind != "f" or dtype.kind not in "fiub":
        return values.astype(dtype)
    if dtype.kind == "b":
        return values >= 0.5
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        with np.errstate(over="ignore"):
            return np.clip(values, limits.min, limits.max).astype(dtype)
    if not np.isfinite(values).all():
        raise ValueError(f"array {name!r} was {dtype} in the first round, and now has a value that is not finite")
    bounds = np.iinfo(dtype)
    below_end = np.nextafter(float(bounds.max) + 1, 0)  # int64's own greatest value is no float64
    return np.clip(np.rint(values.astype(np.float64)), bounds.min, below_end).astype(dtype)


def _require_names(layout: Layout, local: ArrayRecord) -> None:
    names = {spec.name for spec in layout.tensors}
    if lost := sorted(names - {*local}):
        raise LayoutError(f"array {lost[0]!r:.200} is missing in the reply of the training")
    if extra := sorted({*local} - names):
        raise LayoutError(f"array {extra[0]!r:.200} of the reply of the training was not in the message")


def _fitting(spec: TensorSpec, values: Array, start: np.dtype[Any]) -> Tensor:
    """An array of the trained model in the dtype that it came in. Raises `LayoutError`."""
    if values.shape != spec.shape:
        raise LayoutError(
            f"array {spec.name!r:.200} came with the shape {list(spec.shape)}, and the training returned "
            f"{list(values.shape)}"
        )
    if values.dtype == start:
        return tensor_of(values, spec.name)
    if spec.dtype in FLOATS and values.dtype.kind != "f":
        raise LayoutError(
            f"array {spec.name!r:.200} came as {spec.dtype}, and the training returned {values.dtype}, which a codec "
            "must not round: start the strategy with arrays of the model's own dtypes, such as "
            "ArrayRecord(model.state_dict())"
        )
    if not np.can_cast(values.dtype, start, "same_kind"):
        raise LayoutError(
            f"array {spec.name!r:.200} came as {spec.dtype}, and the training returned {values.dtype}: return it in "
            "the dtype in which it came"
        )
    with np.errstate(over="ignore"):  # an infinity is refused where the change is encoded
        return tensor_of(values.astype(start), spec.name)
