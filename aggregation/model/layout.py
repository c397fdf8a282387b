"""A model's state dict as one flat vector: names, shapes, dtypes, and a digest that both ends compare.

A `Layout` lists the tensors of a state dict in the order of their names (by code point): it depends neither on the
order in which a framework registers parameters nor on a file's. Each tensor that owns its values has a place (offset,
length) in a vector of float32; a tied tensor (the same storage under a second name) is listed with the name it is tied
to and takes no place. What travels is the *weight change* `local - global` as such a vector:

- float32, bfloat16, float16: the difference, taken in float32;
- float64: the difference taken in float64, then rounded to float32;
- integers and bool (step counters such as BatchNorm's `num_batches_tracked`): the difference times 2^-16, so that a
  counter's thousands stand beside weight changes without leaving the grid, or drowning them under a lossy codec. It is
  exact up to 2^24, float32's own limit; a larger change is refused rather than rounded.

The coordinator keeps a *master* copy: half-precision tensors widened to float32, all others as they are. Rounding the
published model to 16 bits therefore never eats updates that are smaller than half a unit in the last place. Nor does
publishing it in steps (`publishing.py`), for which any model has a master copy apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from umbel.aggregation.errors import LayoutError, ModelOverflow
from umbel.aggregation.torch_later import torch
from umbel.aggregation.update.grid import PIECE_VALUES

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "Mapping[str, Tensor]"

_HALF = {"bfloat16", "float16"}
_FLOATS = {"float32", "float64"} | _HALF
_STATISTICS = frozenset({"running_mean", "running_var"})
_DTYPES = {"int8", "int16", "int32", "int64", "uint8", "bool"} | _FLOATS
_EXACT_IN_FLOAT32 = 1 << 24
N_VALUES_MAX = 1 << 48  # a header's counts stay far from 2^64; no machine holds such a model
_DIMENSIONS_MAX = 64
_INTEGER_UNIT = 2.0**-16  # what a change of one in an integer tensor becomes in the vector


class HasMean(Protocol):
    """What a round's sum comes to."""

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """The weighted mean of coordinates `start` to `stop` of the vector, float64, to write over."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: `offset` is its first value's index in the vector; `tied_to` names the owner of its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    tied_to: str | None = None

    @property
    def is_coded(self) -> bool:
        """Whether its values may be rounded with the others': those of integers and bools may not. Nor may the running
        statistics of normalization layers, as torch names them: they change by orders of magnitude more than weights,
        which would vanish in a step or a norm that both have in common.
        """
        return self.dtype in _FLOATS and self.name.rpartition(".")[2] not in _STATISTICS

    @property
    def n_values(self) -> int:
        """Length of its place in the vector (0-d tensors hold one value)."""
        return 0 if self.tied_to is not None else math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """What the coordinator's copy of it is made of."""
        return torch.float32 if self.dtype in _HALF else self.torch_dtype

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.n_values)


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a model stands in the flat vector. Build it with `of_state` or `from_json`."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if any(before.name >= after.name for before, after in pairwise(self.tensors)):
            raise LayoutError("not a layout: the tensors must be in the order of their names, each name once")
        offset, owners = 0, dict[str, TensorSpec]()
        for spec in self.tensors:
            _require_spec(spec, offset, owners)
            offset += spec.n_values

    @classmethod
    def of_state(cls, state: State) -> Layout:
        """The layout of a state dict.

        Raises `LayoutError` for what is no dense tensor, for dtypes that have no mean (complex, float8), and for
        tensors without values (on the meta device).
        """
        owners: dict[tuple[object, ...], str] = {}
        specs: list[TensorSpec] = []
        offset = 0
        for name, tensor in sorted(state.items()):
            _require_tensor(name, tensor)
            owner = owners.setdefault(_identity(tensor, name), name)
            tied_to = None if owner == name else owner
            spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset, tied_to)
            specs.append(spec)
            offset += spec.n_values
        return cls(tuple(specs))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The inverse of `to_json`. Raises `LayoutError` for anything `to_json` could not have written."""
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"not a layout: {error}") from error
        if not isinstance(rows, list):
            raise LayoutError("not a layout: not an array")
        layout = cls(tuple(map(_spec_of_row, cast(list[object], rows))))
        if layout.to_json() != text:
            raise LayoutError("not a layout: not in canonical form")
        return layout

    def to_json(self) -> str:
        """Canonical JSON: the text whose SHA-256 is `digest`."""
        rows = [[t.name, list(t.shape), t.dtype, t.offset, t.tied_to] for t in self.tensors]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def n_values(self) -> int:
        return sum(spec.n_values for spec in self.tensors)

    def owners(self) -> Iterator[TensorSpec]:
        """The tensors that own values: all but the tied ones."""
        return (spec for spec in self.tensors if spec.tied_to is None)

    def difference(self, other: Layout) -> str:
        """In words, the first thing in which two layouts differ; empty if they are the same."""
        ours, theirs = ({spec.name: spec for spec in layout.tensors} for layout in (self, other))
        if missing := [name for name in ours if name not in theirs]:
            return f"tensor {missing[0]!r} is missing"
        if extra := [name for name in theirs if name not in ours]:
            return f"tensor {extra[0]!r} is not in the model"
        for name, spec in ours.items():
            if (spec.shape, spec.dtype) != (theirs[name].shape, theirs[name].dtype):
                mine, yours = (f"{s.dtype}{list(s.shape)}" for s in (spec, theirs[name]))
                return f"tensor {name!r} is {yours}, not {mine}"
        return "" if self == other else "tensors are tied differently"

    def require(self, state: State, what: str) -> None:
        """Raise `LayoutError` unless `state` has this layout."""
        if difference := self.difference(Layout.of_state(state)):
            raise LayoutError(f"{what} does not fit the model: {difference}")

    def subtract(self, local: State, start: State) -> Tensor:
        """The weight change `local - start` as one float32 vector of `n_values`, on the CPU.

        The states may live on any device, and need only the owners. Raises `LayoutError` for a missing tensor, another
        shape, or an integer that changed by more than 2^24.
        """
        change = torch.empty(self.n_values, dtype=torch.float32)
        for spec in self.owners():
            after, before = _values_of(spec, local, "the trained state"), _values_of(spec, start, "the start state")
            change[spec.place] = weight_change(spec, after, before).reshape(-1)
        return change

    def add_mean(self, master: State, mean: HasMean, learning_rate: float = 1.0) -> dict[str, Tensor]:
        """The next master copy: `master + learning_rate * mean`, a new tensor on the CPU for each owner.

        Floats are added in float64 and rounded once to the master's dtype; integers take the mean change rounded to the
        nearest integer, at most 2^24, and stop at their dtype's limits; a bool takes the majority. Multiplication and
        addition are separate operations: no fused multiply-add makes the bits depend on the processor. Raises
        `ModelOverflow` for a float that leaves its dtype's finite range.
        """
        return {s.name: _stepped(s, master[s.name], mean, learning_rate) for s in self.owners()}

    def master_of(self, state: State) -> dict[str, Tensor]:
        """The coordinator's copy, on the CPU: owners only, half precision widened to float32."""
        return {s.name: state[s.name].detach().to("cpu", s.master_dtype, copy=True).contiguous() for s in self.owners()}

    def published(self, master: State) -> dict[str, Tensor]:
        """What clients download: the master copy in the model's own dtypes, owners only; see `published`."""
        return {s.name: published(s, master[s.name]) for s in self.owners()}

    @property
    def is_full_precision(self) -> bool:
        """Whether no tensor is of half precision: a master copy has the same dtypes then, and may be the model."""
        return all(spec.dtype not in _HALF for spec in self.owners())

    def full_state(self, owned: State) -> dict[str, Tensor]:
        """A state dict with every name, tied ones included, from the owners' tensors."""
        return {spec.name: owned[spec.tied_to or spec.name] for spec in self.tensors}


def _spec_of_row(row: object) -> TensorSpec:
    match row:
        case [str(name), [*sizes], str(dtype), int(offset), (str() | None) as tied_to]:
            shape = tuple(size for size in sizes if type(size) is int)
            if len(shape) == len(sizes) and type(offset) is int:  # a JSON true is no count
                return TensorSpec(name, shape, dtype, offset, tied_to)
        case _:
            pass
    raise LayoutError("not a layout: a row is not [name, shape, dtype, offset, tied_to]")


def _require_spec(spec: TensorSpec, offset: int, owners: dict[str, TensorSpec]) -> None:
    """Refuse a tensor that cannot follow these owners at this offset; add it to `owners` if it is one."""
    if spec.dtype not in _DTYPES or spec.offset != offset or len(spec.shape) > _DIMENSIONS_MAX:
        raise LayoutError(f"not a layout: tensor {spec.name!r} is malformed")
    if any(not 0 <= size <= N_VALUES_MAX for size in spec.shape) or offset + spec.n_values > N_VALUES_MAX:
        raise LayoutError(f"not a layout: tensor {spec.name!r} has an impossible shape")
    if spec.tied_to is None:
        owners[spec.name] = spec
    elif (owner := owners.get(spec.tied_to)) is None or (owner.shape, owner.dtype) != (spec.shape, spec.dtype):
        raise LayoutError(f"not a layout: tensor {spec.name!r} is tied to a tensor that is not before it, or differs")


def _require_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"entry {name!r} of the state dict is a {type(tensor).__name__}, not a tensor")
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise LayoutError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be averaged")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise LayoutError(f"tensor {name!r} is sparse or on the meta device; lay out a dense model with values")


def _values_of(spec: TensorSpec, state: State, what: str) -> Tensor:
    """The tensor on the CPU. Raises `LayoutError` if it is missing or has another shape."""
    tensor = state.get(spec.name)
    if tensor is None or tuple(tensor.shape) != spec.shape:
        found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(spec.shape)}"
        raise LayoutError(f"{what} does not fit the model: tensor {spec.name!r} {found}")
    return tensor.detach().cpu()


def _identity(tensor: Tensor, name: str) -> tuple[object, ...]:
    """Equal for two names of the same values. Empty tensors share null storage by accident, so they are never tied."""
    if tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def weight_change(spec: TensorSpec, local: Tensor, start: Tensor) -> Tensor:
    """`Layout.subtract` for some values of one tensor, for whoever cannot hold the change beside the model.

    Both of one shape, on one device. Raises `LayoutError` for an integer that changed by more than 2^24.
    """
    if spec.dtype in _FLOATS:
        wide = torch.float64 if spec.dtype == "float64" else torch.float32
        return local.to(wide).sub(start.to(wide)).to(torch.float32)
    after, before = local.to(torch.int64), start.to(torch.int64)
    change = after - before
    has_wrapped = (change < 0) != (after < before)
    if bool(((change < -_EXACT_IN_FLOAT32) | (change > _EXACT_IN_FLOAT32) | has_wrapped).any()):
        raise LayoutError(f"integer tensor {spec.name!r} changed by more than 2^24, which float32 cannot carry exactly")
    return change.to(torch.float32).mul_(_INTEGER_UNIT)


def step(spec: TensorSpec, start: Tensor, first: int, mean: HasMean, learning_rate: float) -> Tensor:
    """`Layout.add_mean` for some consecutive values of one tensor, for whoever cannot hold the model beside the sum.

    `start`: in the master's dtype; its first value is the tensor's `first`-th.
    """
    change = mean.mean_slice(spec.offset + first, spec.offset + first + start.numel())
    if spec.dtype in _FLOATS:
        return _require_finite(
            spec, start.to(torch.float64, copy=True).add_(change.mul_(learning_rate)).to(start.dtype)
        )
    if spec.dtype == "bool":
        return start.to(torch.float64).add_(change.div_(_INTEGER_UNIT)) >= 0.5
    most, limits = _EXACT_IN_FLOAT32, torch.iinfo(spec.torch_dtype)
    before = start.to(torch.int64, copy=True)
    whole = change.div_(_INTEGER_UNIT).clamp_(-most, most).round_().to(torch.int64)
    room_up = limits.max - before.clamp(min=limits.max - most)  # at most `most`, so that nothing here can wrap
    room_down = limits.min - before.clamp(max=limits.min + most)
    return before.add_(whole.clamp_(room_down, room_up)).to(spec.torch_dtype)


def published(spec: TensorSpec, master: Tensor) -> Tensor:
    """Values of one tensor's master copy as clients download them.

    What half precision cannot hold becomes its greatest finite value: the master keeps the true one, and an infinity
    would make every client's next update one that must be refused.
    """
    if spec.dtype not in _HALF:
        return master
    limits = torch.finfo(spec.torch_dtype)
    return master.clamp(limits.min, limits.max).to(spec.torch_dtype)


def _require_finite(spec: TensorSpec, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise ModelOverflow(
            f"tensor {spec.name!r} would leave the finite range of {str(values.dtype).removeprefix('torch.')}; "
            "the run has diverged: lower max_abs or a learning rate"
        )
    return values


def _stepped(spec: TensorSpec, start: Tensor, mean: HasMean, learning_rate: float) -> Tensor:
    """One tensor of `add_mean`, in pieces: the float64 scratch of a large tensor would outweigh the whole model."""
    values, stepped = start.reshape(-1), torch.empty(spec.shape, dtype=start.dtype)
    for first in range(0, spec.n_values, PIECE_VALUES):
        piece = slice(first, min(first + PIECE_VALUES, spec.n_values))
        stepped.view(-1)[piece] = step(spec, values[piece], first, mean, learning_rate)
    return stepped
