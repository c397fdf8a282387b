"""A model in pieces that fit into memory: tensor by tensor, or along its vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from umbel.aggregation.model.layout import Layout, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECE_VALUES = 1 << 17  # 1 MiB of float64 scratch stays in the second-level cache


class Values(Protocol):
    """The values of a model, by tensor, in a file or in memory."""

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        """Values `first` to `first + n_values` of a tensor of `dtype`: one dimension, a new tensor."""
        ...

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Overwrite the tensor's values from `first` on with `values`: one dimension, of the tensor's dtype."""
        ...


class InMemory:
    """The values of a state dict of contiguous tensors on the CPU. `write` overwrites them."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._flat = {name: tensor.view(-1) for name, tensor in state.items()}

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        return self._flat[name][first : first + n_values].clone()

    def write(self, name: str, first: int, values: Tensor) -> None:
        self._flat[name][first : first + values.numel()] = values


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive values of one tensor."""

    spec: TensorSpec
    first: int  # the index of the first one in the tensor
    n_values: int

    def of(self, values: Values, dtype: torch.dtype) -> Tensor:
        """These values. `dtype`: that of the tensor in `values`."""
        return values.read(self.spec.name, dtype, self.first, self.n_values)

    def put(self, values: Values, new: Tensor) -> None:
        """Overwrite these values with `new`."""
        values.write(self.spec.name, self.first, new)


def pieces(layout: Layout) -> Iterator[Piece]:
    """The whole model, tensor by tensor, in pieces of at most `PIECE_VALUES`."""
    for spec in layout.owners():
        for first in range(0, spec.n_values, PIECE_VALUES):
            yield Piece(spec, first, min(PIECE_VALUES, spec.n_values - first))


def segments(layout: Layout, size: int) -> Iterator[list[Piece]]:
    """The vector in segments of `size` values, the last one shorter. Each segment is a list of its pieces."""
    segment, n_left = list[Piece](), size
    for spec in layout.owners():
        first = 0
        while first < spec.n_values:
            piece = Piece(spec, first, min(n_left, spec.n_values - first))
            segment.append(piece)
            first, n_left = first + piece.n_values, n_left - piece.n_values
            if n_left == 0:
                yield segment
                segment, n_left = [], size
    if segment:
        yield segment
