"""A model in pieces small enough for memory: tensor by tensor, or along its vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.torch_later import torch
from umbel.aggregation.update.grid import PIECE_VALUES

if TYPE_CHECKING:
    from torch import Tensor


class Values(Protocol):
    """A model's values, by tensor, wherever they are kept."""

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        """Values `first` to `first + n_values` of a tensor of `dtype`: one dimension, to write over."""
        ...

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Put `values` (one dimension, the tensor's dtype) in the place of values `first` and following."""
        ...


class InMemory:
    """The values of a state dict of contiguous tensors on the CPU; `write` writes over them."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._flat = {name: tensor.view(-1) for name, tensor in state.items()}

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        return self._flat[name][first : first + n_values].clone()

    def write(self, name: str, first: int, values: Tensor) -> None:
        self._flat[name][first : first + values.numel()] = values


@dataclass(frozen=True, slots=True)
class Piece:
    """`n_values` consecutive values of one tensor, from its `first`-th on."""

    spec: TensorSpec
    first: int
    n_values: int

    def of(self, values: Values, dtype: torch.dtype) -> Tensor:
        """These values, of a tensor that is kept in `dtype`."""
        return values.read(self.spec.name, dtype, self.first, self.n_values)


def pieces(layout: Layout) -> Iterator[Piece]:
    """Every value, tensor by tensor."""
    for spec in layout.owners():
        for first in range(0, spec.n_values, PIECE_VALUES):
            yield Piece(spec, first, min(PIECE_VALUES, spec.n_values - first))


def segments(layout: Layout, size: int) -> Iterator[list[Piece]]:
    """The vector in segments of `size` values, the last one shorter; each as the pieces that it consists of."""
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
