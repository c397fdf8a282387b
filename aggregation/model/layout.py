"""The description of a model as one flat vector: names, shapes, dtypes, and a digest that both ends compare.

A `Layout` lists the tensors of a state dict by name, in code point order. So it depends neither on the order in which
a framework registers parameters nor on a file's order. A tensor that owns its values has a place (offset, length) in a
vector of float32. A tied tensor (a second name for the same storage) names its owner and takes no place.

A layout has only tensors that the coordinator has (`plans/tensors.py` has the kinds). `Layout.update` is the layout of
what clients send: tensors of the kind `global` are not in it. `Layout.model` is that of the model itself: SCAFFOLD's
control variates, tensors of the kind `control`, are not in it.

Nothing here imports torch. `state.py` has the tensors.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol, TypeVar, cast, runtime_checkable

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.plans.tensors import KINDS_HELD, TensorKind

HALF_PRECISION = frozenset({"bfloat16", "float16"})
FLOATS = HALF_PRECISION | {"float32", "float64"}
STATISTICS = frozenset({"running_mean", "running_var"})
"""The running statistics of normalization layers, by torch's names."""
SLOTS_PREFIX = "umbel."  # of the names, in a master copy's file, of what the server's optimizer remembers
_ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "bfloat16": 2, "float16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
DTYPES = frozenset(_ITEM_BYTES)  # that a tensor of a model may have
CONTROL_PREFIX = "umbel.control/"  # of the name of a weight's control variate; the weight's own name follows
INTEGER_UNIT = 2.0**-16  # what a change of one in an integer tensor becomes in the vector
N_VALUES_MAX = 1 << 48  # a header's counts stay far from 2^64; no machine holds such a model
PIECE_VALUES = 1 << 17  # a model is read in pieces: 1 MiB of float64 scratch stays in the second-level cache
_DIMENSIONS_MAX = 64
_Value = TypeVar("_Value")


@runtime_checkable
class DenseTensor(Protocol):
    """The attributes of a torch tensor from which a layout is made."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> object: ...
    @property
    def layout(self) -> object: ...
    @property
    def is_meta(self) -> bool: ...
    def stride(self) -> tuple[int, ...]: ...
    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # of its first value in the vector
    tied_to: str | None = None  # the name of the tensor that owns the values
    kind: TensorKind = "mean"  # of those that the coordinator has

    @property
    def is_sent(self) -> bool:
        """Whether clients send its change."""
        return self.kind != "global"

    @property
    def is_coded(self) -> bool:
        """Whether a codec may round its values; if not, the tensor is exact.

        Integers and bools are exact. So are the running statistics of normalization layers, by torch's names for them:
        they change by orders of magnitude more than weights, which would vanish in a common step or norm.
        """
        return self.dtype in FLOATS and self.name.rpartition(".")[2] not in STATISTICS

    @property
    def is_stepped(self) -> bool:
        """Whether the server's optimizer moves it. Running statistics, integers and bools take their mean change."""
        return self.kind == "mean" and self.is_coded

    @property
    def controls(self) -> str | None:
        """The name of the weight that this control variate is of; None for another tensor."""
        is_control = self.kind == "control" and self.name.startswith(CONTROL_PREFIX)
        return self.name.removeprefix(CONTROL_PREFIX) if is_control else None

    @property
    def n_values(self) -> int:
        """The length of its place in the vector: 0 for a tied tensor, 1 for a 0-d tensor."""
        return 0 if self.tied_to is not None else math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """The bytes of its own values, in its own dtype."""
        return self.n_values * _ITEM_BYTES[self.dtype]

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.n_values)


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a model stands in the flat vector. Make one with `of_state` or `from_json`."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if any(before.name >= after.name for before, after in pairwise(self.tensors)):
            raise LayoutError("invalid layout: its tensors must be sorted by name, each name once")
        offset, owners = 0, dict[str, TensorSpec]()
        for spec in self.tensors:
            _require_spec(spec, offset, owners)
            offset += spec.n_values

    @classmethod
    def of_state(
        cls, state: Mapping[str, DenseTensor], kind_of: Callable[[str], TensorKind] = lambda _name: "mean"
    ) -> "Layout":
        """The layout of a state dict of torch tensors. `kind_of`: the kind of the tensor with this name.

        Tensors that stay at the site (private and base) are not in it. Raises `LayoutError` for an entry that is not a
        dense tensor, for a dtype that has no mean (complex, float8), for a tensor without values (on the meta device)
        and for tied tensors of two kinds.
        """
        owners: dict[tuple[object, ...], str] = {}
        specs: list[TensorSpec] = []
        offset = 0
        for name, tensor in sorted(state.items()):
            kind = kind_of(name)
            dtype = _dtype_of(name, tensor)
            owner = owners.setdefault(_identity(tensor, name), name)
            if kind != (owners_kind := kind_of(owner)):
                raise LayoutError(_two_kinds(name, kind, owner, owners_kind))
            if kind not in KINDS_HELD:
                continue
            tied_to = None if owner == name else owner
            spec = TensorSpec(name, tuple(tensor.shape), dtype, offset, tied_to, kind)
            specs.append(spec)
            offset += spec.n_values
        return cls(tuple(specs))

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """The inverse of `to_json`. Raises `LayoutError` for any text that `to_json` does not write."""
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"invalid layout: {error}") from error
        if not isinstance(rows, list):
            raise LayoutError("invalid layout: it must be a JSON array")
        layout = cls(tuple(map(_spec_of_row, cast(list[object], rows))))
        if layout.to_json() != text:
            raise LayoutError("invalid layout: it is not in canonical form")
        return layout

    def to_json(self) -> str:
        """Canonical JSON. `digest` is the SHA-256 of this text. Only a row of a kind other than mean states it."""
        rows = [
            [t.name, list(t.shape), t.dtype, t.offset, t.tied_to, *([] if t.kind == "mean" else [t.kind])]
            for t in self.tensors
        ]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def n_values(self) -> int:
        return sum(spec.n_values for spec in self.tensors)

    @cached_property
    def update(self) -> "Layout":
        """The layout of what clients send, with places of its own; this layout itself if clients send all of it."""
        if all(spec.is_sent for spec in self.tensors):
            return self
        return _placed(spec for spec in self.tensors if spec.is_sent)

    @cached_property
    def model(self) -> "Layout":
        """The layout of the model itself, without control variates; this layout itself if it has none."""
        if all(spec.kind != "control" for spec in self.tensors):
            return self
        return _placed(spec for spec in self.tensors if spec.kind != "control")

    @cached_property
    def with_control(self) -> "Layout":
        """The layout of the model with a control variate, float32, for each tensor that the server's step moves."""
        weights = (spec for spec in self.model.owners() if spec.is_stepped)
        control = [replace(one, name=CONTROL_PREFIX + one.name, dtype="float32", kind="control") for one in weights]
        return _placed(sorted((*self.model.tensors, *control), key=lambda spec: spec.name))

    @property
    def has_control(self) -> bool:
        """Whether there are control variates in it."""
        return self.model is not self

    def with_kinds(self, kind_of: Callable[[str], TensorKind]) -> "Layout":
        """The layout of the same model with these kinds, without what stays at sites. Raises `LayoutError` for ties of
        two kinds.
        """
        kinds: dict[str, TensorKind] = {spec.name: kind_of(spec.name) for spec in self.tensors}
        for spec in self.tensors:
            if spec.tied_to is not None and kinds[spec.name] != kinds[spec.tied_to]:
                raise LayoutError(_two_kinds(spec.name, kinds[spec.name], spec.tied_to, kinds[spec.tied_to]))
        return _placed(replace(one, kind=kinds[one.name]) for one in self.tensors if kinds[one.name] in KINDS_HELD)

    def owners(self) -> Iterator[TensorSpec]:
        """The tensors that own values: all but the tied ones."""
        return (spec for spec in self.tensors if spec.tied_to is None)

    def pieces(self) -> Iterator[tuple[TensorSpec, slice]]:
        """The pieces in which a client reads a weight change: each tensor that owns values, and where in its values."""
        for spec in self.owners():
            for first in range(0, spec.n_values, PIECE_VALUES):
                yield spec, slice(first, min(first + PIECE_VALUES, spec.n_values))

    def difference(self, other: "Layout") -> str:
        """The first difference between two layouts, in words; empty if they are equal."""
        ours, theirs = ({spec.name: spec for spec in layout.tensors} for layout in (self, other))
        if missing := [name for name in ours if name not in theirs]:
            return f"tensor {missing[0]!r} is missing"
        if extra := [name for name in theirs if name not in ours]:
            return f"tensor {extra[0]!r} is not in the model"
        for name, spec in ours.items():
            if (spec.shape, spec.dtype) != (theirs[name].shape, theirs[name].dtype):
                mine, yours = (f"{s.dtype}{list(s.shape)}" for s in (spec, theirs[name]))
                return f"tensor {name!r} is {yours}, not {mine}"
            if spec.kind != theirs[name].kind:
                return f"tensor {name!r} has the kind {theirs[name].kind}, not {spec.kind}"
        return "" if self == other else "tensors are tied differently"

    def require(self, state: Mapping[str, DenseTensor], what: str) -> None:
        """Raise `LayoutError` unless `state` has this layout. A state dict knows no kinds, so they are not compared."""
        kinds: Mapping[str, TensorKind] = {spec.name: spec.kind for spec in self.tensors}
        if difference := self.difference(Layout.of_state(state, lambda name: kinds.get(name, "mean"))):
            raise LayoutError(f"{what} does not fit the model: {difference}")

    @property
    def is_full_precision(self) -> bool:
        """Whether no tensor has half precision. Then a master copy has the same dtypes, and may be the model itself."""
        return all(spec.dtype not in HALF_PRECISION for spec in self.owners())

    def full_state(self, owned: Mapping[str, _Value]) -> dict[str, _Value]:
        """A state dict with every name, including the tied ones, from the owners' tensors."""
        return {spec.name: owned[spec.tied_to or spec.name] for spec in self.tensors}


def _placed(specs: Iterable[TensorSpec]) -> Layout:
    """The layout of these tensors, with places counted anew."""
    placed, offset = list[TensorSpec](), 0
    for spec in specs:
        placed.append(replace(spec, offset=offset))
        offset += spec.n_values
    return Layout(tuple(placed))


def _spec_of_row(row: object) -> TensorSpec:
    match row:
        case [str(name), [*sizes], str(dtype), int(offset), (str() | None) as tied_to, *rest]:
            shape = tuple(size for size in sizes if type(size) is int)
            kind = _kind_of_rest(rest)
            if kind and len(shape) == len(sizes) and type(offset) is int:  # a JSON true is no count
                return TensorSpec(name, shape, dtype, offset, tied_to, kind)
        case _:
            pass
    raise LayoutError("invalid layout: each row must be [name, shape, dtype, offset, tied_to], and may have a kind")


def _kind_of_rest(rest: list[object]) -> TensorKind | None:
    """The kind of a row that goes on with these elements after the fifth; None if no row does."""
    if not rest:
        return "mean"
    return next((kind for kind in KINDS_HELD - {"mean"} if rest == [kind]), None)


def _two_kinds(name: str, kind: TensorKind, owner: str, owners_kind: TensorKind) -> str:
    return (
        f"tensors {owner!r} and {name!r} are tied (two names of the same values), but have the kinds {owners_kind} and "
        f"{kind}: give both names one kind"
    )


def _require_spec(spec: TensorSpec, offset: int, owners: dict[str, TensorSpec]) -> None:
    """Refuse a tensor that cannot follow these owners at this offset. Add it to `owners` if it owns its values."""
    if spec.dtype not in _ITEM_BYTES or spec.offset != offset or len(spec.shape) > _DIMENSIONS_MAX:
        raise LayoutError(
            f"invalid layout: tensor {spec.name!r} has an unknown dtype, a wrong offset, or more than "
            f"{_DIMENSIONS_MAX} dimensions"
        )
    if any(not 0 <= size <= N_VALUES_MAX for size in spec.shape) or offset + spec.n_values > N_VALUES_MAX:
        raise LayoutError(f"invalid layout: tensor {spec.name!r} has a negative size, or too many values")
    if spec.kind == "count" and (spec.dtype in FLOATS or spec.dtype == "bool"):
        raise LayoutError(
            f"tensor {spec.name!r} has the kind count, but the dtype {spec.dtype}: only integers are added up exactly"
        )
    if spec.kind == "control" and (spec.tied_to is not None or spec.dtype != "float32" or spec.controls is None):
        raise LayoutError(
            f"tensor {spec.name!r} has the kind control, so it must be float32 of its own, with a name that begins "
            f"with {CONTROL_PREFIX!r}: `umbel run create` adds such tensors itself"
        )
    if spec.tied_to is None:
        owners[spec.name] = spec
    elif (owner := owners.get(spec.tied_to)) is None or (owner.shape, owner.dtype) != (spec.shape, spec.dtype):
        raise LayoutError(
            f"invalid layout: tensor {spec.name!r} is tied to a tensor that does not come before it, or "
            "that has another shape or dtype"
        )
    elif spec.kind != owner.kind:
        raise LayoutError(f"invalid layout: {_two_kinds(spec.name, spec.kind, owner.name, owner.kind)}")


def _dtype_of(name: str, tensor: object) -> str:
    """The dtype's name, such as float32. Raises `LayoutError` for what no layout can hold."""
    if not isinstance(tensor, DenseTensor):
        raise LayoutError(f"entry {name!r} of the state dict is a {type(tensor).__name__}, not a tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _ITEM_BYTES:
        raise LayoutError(f"tensor {name!r} has dtype {tensor.dtype}, which cannot be averaged")
    if str(tensor.layout) != "torch.strided" or tensor.is_meta:
        raise LayoutError(
            f"tensor {name!r} is sparse, or on the meta device without values; use a dense model with values"
        )
    return dtype


def _identity(tensor: DenseTensor, name: str) -> tuple[object, ...]:
    """Equal for two names of the same values. Empty tensors all share null storage, so they never count as tied."""
    if tensor.numel() == 0:
        return (name,)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
