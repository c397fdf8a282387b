"""A model's tensors, also in pieces that fit into memory: weight changes, the master copy, and what clients download.

What travels is the *weight change* `local - start`, as one float32 vector in the order of the layout:

- float32, bfloat16, float16: the difference, taken in float32;
- float64: the difference, taken in float64 and then rounded to float32;
- integers and bool (such as BatchNorm's `num_batches_tracked`): the difference times 2^-16. Then a counter's thousands
  fit on the grid beside weight changes, and do not drown them under a lossy codec. This is exact up to 2^24, float32's
  own limit. A larger change is refused.

The coordinator keeps a *master* copy: half-precision tensors widened to float32, all others as they are. So rounding
the published model to 16 bits never loses updates that are smaller than half a unit in the last place. A run that sends
changes also keeps a master copy of its own, whatever the dtypes (`downlink/publishing.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.layout import FLOATS, HALF_PRECISION, INTEGER_UNIT, PIECE_VALUES, Layout, TensorSpec


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


State: TypeAlias = Mapping[str, Tensor]

EXACT_IN_FLOAT32 = 1 << 24


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The dtype of the model's own tensor."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def master_dtype(spec: TensorSpec) -> torch.dtype:
    """The dtype of the tensor in the master copy."""
    return torch.float32 if spec.dtype in HALF_PRECISION else torch_dtype(spec)


def empty_state(layout: Layout, dtype_of: Callable[[TensorSpec], torch.dtype]) -> dict[str, Tensor]:
    """New tensors for the owners, not initialized. `dtype_of`: `torch_dtype` or `master_dtype`."""
    return {spec.name: torch.empty(spec.shape, dtype=dtype_of(spec)) for spec in layout.owners()}


def with_first_control(state: State, layout: Layout) -> dict[str, Tensor]:
    """A model's state with the control variates of this layout, as a run begins with them: zeros."""
    control = {spec.name: torch.zeros(spec.shape) for spec in layout.tensors if spec.kind == "control"}
    return {**state, **control}


def weight_change(spec: TensorSpec, local: Tensor, start: Tensor) -> Tensor:
    """The weight change of some values of one tensor, as float32.

    `local` and `start` have one shape and one device. Raises `LayoutError` for an integer that changed by more than
    2^24.
    """
    if spec.dtype in FLOATS:
        wide = torch.float64 if spec.dtype == "float64" else torch.float32
        return local.to(wide).sub(start.to(wide)).to(torch.float32)
    after, before = local.to(torch.int64), start.to(torch.int64)
    change = after - before
    has_wrapped = (change < 0) != (after < before)
    if bool(((change < -EXACT_IN_FLOAT32) | (change > EXACT_IN_FLOAT32) | has_wrapped).any()):
        raise LayoutError(f"integer tensor {spec.name!r} changed by more than 2^24, which float32 cannot carry exactly")
    return change.to(torch.float32).mul_(INTEGER_UNIT)


def with_device(pieces: Iterator[Tensor]) -> tuple[torch.device, Iterator[Tensor]]:
    """The device of the first piece (the CPU if there is none), and all pieces. Takes the first piece at once."""
    first = next(pieces, None)
    return (torch.device("cpu"), iter(())) if first is None else (first.device, chain((first,), pieces))


def master_of(layout: Layout, state: State) -> dict[str, Tensor]:
    """The master copy of a state, on the CPU, owners only."""
    return {
        spec.name: state[spec.name].detach().to("cpu", master_dtype(spec), copy=True).contiguous()
        for spec in layout.owners()
    }


def published(spec: TensorSpec, master: Tensor) -> Tensor:
    """Values of one tensor of the master copy, as clients download them.

    A value beyond the range of half precision becomes the greatest finite value. The master copy keeps the true one. An
    infinity would make every client's next update one that must be refused.
    """
    if spec.dtype not in HALF_PRECISION:
        return master
    limits = torch.finfo(torch_dtype(spec))
    return master.clamp(limits.min, limits.max).to(torch_dtype(spec))


class Places:
    """The places of some tensors of a layout in its vector."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._runs = [(one.offset, one.n_values) for one in specs if one.n_values]
        self.n_values = sum(length for _, length in self._runs)  # of all these tensors

    def within(self, first: int, n_values: int) -> Iterator[tuple[int, slice]]:
        """The runs of their values among the coordinates `first` to `first + n_values`.

        Each is the index of its first value among all these values, and its place among the `n_values`.
        """
        n_before = 0
        for offset, length in self._runs:
            start, stop = max(offset, first), min(offset + length, first + n_values)
            if start < stop:
                yield n_before + start - offset, slice(start - first, stop - first)
            n_before += length


class CountPlaces(Places):
    """The places of a layout's tensors of the kind count, whose changes are added up and not averaged."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(one for one in layout.owners() if one.kind == "count")


class ControlPlaces(Places):
    """The places of a layout's control variates in its vector."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(one for one in layout.owners() if one.kind == "control")

    def clear(self, values: Tensor) -> None:
        """Replace them with zeros in a whole vector."""
        for _, here in self.within(0, values.numel()):
            values[here] = 0.0


class ExactPlaces(Places):
    """The places of a layout's exact tensors in its vector."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(one for one in layout.owners() if not one.is_coded)

    def taken_out(self, values: Tensor, first: int) -> bytes:
        """Replace the exact ones of `values` with zeros; return them as little-endian float32.

        `values`: float32, the coordinates from `first` on, on any device.
        """
        places = (here for _, here in self.within(first, values.numel()))
        taken = b"".join(values[here].cpu().numpy().astype("<f4", copy=False).tobytes() for here in places)
        self.clear(values, first)
        return taken

    def clear(self, values: Tensor, first: int) -> None:
        """Replace the exact ones of `values`, the coordinates from `first` on, with zeros."""
        for _, here in self.within(first, values.numel()):
            values[here] = 0.0

    def put_back(self, values: Tensor, first: int, exact: Tensor) -> Tensor:
        """`values`, the coordinates from `first` on, with the exact ones in their places.

        `exact`: all exact values of the layout, in order. Returns a copy of that type, or `values` itself if none of
        them is here.
        """
        places = tuple(self.within(first, values.numel()))
        if not places:
            return values
        whole = values.to(exact.dtype, copy=True)
        for at, here in places:
            whole[here] = exact[at : at + here.stop - here.start]
        return whole
