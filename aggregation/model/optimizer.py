"""From a round's mean to the next model: `master + learning_rate * mean`, a piece at a time.

Floats are added in float64 and rounded once to the master copy's dtype. Integers take the mean change rounded to the
nearest integer, at most 2^24, and stop at their dtype's limits. A bool takes the majority. Integers of the kind count
take the sum of all changes instead, exactly, without the learning rate. Tensors that clients do not send (the kind
global) stay as they are. Multiplication and addition are separate operations: a fused multiply-add would make the bits
depend on the processor.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from umbel.aggregation.errors import ModelOverflow
from umbel.aggregation.model.layout import FLOATS, INTEGER_UNIT, Layout, TensorSpec
from umbel.aggregation.model.state import (
    EXACT_IN_FLOAT32,
    Piece,
    Values,
    master_dtype,
    pieces,
    published,
    torch_dtype,
)


class HasMean(Protocol):
    """The weighted mean of a round's updates, from which the next model is made."""

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """Coordinates `start` to `stop` of the mean, in the update's layout: float64, a new tensor."""
        ...


def next_pieces(
    layout: Layout, start: Values, mean: HasMean, learning_rate: float = 1.0
) -> Iterator[tuple[Piece, Tensor]]:
    """The next master copy, piece by piece. `layout`: of the model; `start`: the master copy that the round began with.

    Raises `ModelOverflow` for a float that leaves its dtype's finite range.
    """
    places = {spec.name: spec.offset for spec in layout.update.owners()}
    for piece in pieces(layout):
        before = piece.of(start, master_dtype(piece.spec))
        if not piece.spec.is_sent:
            yield piece, before
            continue
        first = places[piece.spec.name] + piece.first
        yield piece, _step(piece.spec, before, mean.mean_slice(first, first + piece.n_values), learning_rate)


def write_next(
    layout: Layout, start: Values, mean: HasMean, learning_rate: float, public: Values, master: Values | None = None
) -> None:
    """Write the next version: to `public` what clients download, to `master` the master copy.

    `master` is None where the published file itself is the master copy. Raises as `next_pieces` does.
    """
    for piece, values in next_pieces(layout, start, mean, learning_rate):
        piece.put(public, published(piece.spec, values))
        if master is not None:
            piece.put(master, values)


def _step(spec: TensorSpec, start: Tensor, change: Tensor, learning_rate: float) -> Tensor:
    """The next values of a piece. `start`: its values in the master copy, in its dtype; `change`: their mean change,
    float64, which is overwritten.
    """
    if spec.kind == "count":
        return _added(spec, start, change)
    if spec.dtype in FLOATS:
        return _finite(spec, start.to(torch.float64, copy=True).add_(change.mul_(learning_rate)).to(start.dtype))
    if spec.dtype == "bool":
        return start.to(torch.float64).add_(change.div_(INTEGER_UNIT)) >= 0.5
    most, limits = EXACT_IN_FLOAT32, torch.iinfo(torch_dtype(spec))
    before = start.to(torch.int64, copy=True)
    whole = change.div_(INTEGER_UNIT).clamp_(-most, most).round_().to(torch.int64)
    room_up = limits.max - before.clamp(min=limits.max - most)  # at most `most`, so that nothing here can wrap
    room_down = limits.min - before.clamp(max=limits.min + most)
    return before.add_(whole.clamp_(room_down, room_up)).to(torch_dtype(spec))


def _added(spec: TensorSpec, start: Tensor, change: Tensor) -> Tensor:
    """Integers plus the sum of their changes, exactly. Raises `ModelOverflow` beyond their dtype's range."""
    limits, before = torch.iinfo(torch_dtype(spec)), start.to(torch.int64)
    added = change.div_(INTEGER_UNIT).round_().to(torch.int64)
    up, down = added.clamp(min=0), added.clamp(max=0)
    if bool(((before > limits.max - up) | (before < limits.min - down)).any()):
        raise ModelOverflow(
            f"the counts in tensor {spec.name!r} would leave the range of {spec.dtype}; build the model with a wider "
            "integer dtype, such as int64"
        )
    return before.add_(added).to(torch_dtype(spec))


def _finite(spec: TensorSpec, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise ModelOverflow(
            f"tensor {spec.name!r} would leave the finite range of {str(values.dtype).removeprefix('torch.')}; "
            "the run has diverged: lower max_abs or a learning rate"
        )
    return values
