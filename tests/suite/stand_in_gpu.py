"""A stand-in for a GPU on a machine without one: tensors that say "cuda", and whose values are on the CPU.

Torch's fake tensors have no values, so code that asks for a value cannot be run to its end with them. These have
values. So a test can compare bits, and it learns four more things:

- An operation on a tensor of the GPU gets no other tensor from the CPU, except a single number.
- Of an operation that rounds, IEEE 754 leaves one result only. Sums in a library's order, products of matrices and
  logarithms are refused, unless the test allows them. A quotient by a number on the CPU is what a GPU makes of it: the
  product with the inverse, which may have other bits.
- Each copy from one side to the other is noted.
- The greatest memory that tensors took on the GPU at one time is known, without what operations take for themselves.

No tensor on it may require gradients: torch would look for a driver.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")
_COPIES = frozenset({"copy_", "_to_copy", "_local_scalar_dense"})
_QUOTIENTS, _SUMS, _POWERS = frozenset({"div", "div_"}), frozenset({"sum", "cumsum"}), frozenset({"pow", "pow_"})
_WHOLE_MAX = 2.0**53  # up to it float64 holds all sums of whole numbers
# For floats: operations without arithmetic, and those of which IEEE 754 leaves one result.
_MOVES = frozenset({
    "alias", "as_strided", "cat", "clone", "constant_pad_nd", "detach", "empty_like", "expand", "fill_", "index",
    "index_put_", "index_select", "lift_fresh", "new_empty", "new_zeros", "nonzero", "permute", "repeat", "select",
    "slice", "split", "stack", "t", "transpose", "unbind", "_unsafe_view", "unsqueeze", "view", "where", "zero_",
    "zeros_like",
})  # fmt: skip
_ONE_RESULT = frozenset({
    "abs", "add", "add_", "amax", "aminmax", "bucketize", "clamp", "clamp_", "clamp_min", "copysign_", "div", "div_",
    "eq", "floor", "ge", "gt", "isfinite", "le", "lt", "max", "min", "minimum", "mul", "mul_", "ne", "neg",
    "reciprocal", "round", "round_", "sign", "sqrt", "sqrt_", "sub", "sub_", "topk",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between the GPU and the CPU."""

    is_down: bool  # from the GPU to the CPU
    dtype: torch.dtype
    n_values: int


class OnGpu(Tensor):
    """A tensor that says that it is on the GPU."""

    held: Tensor  # its values
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # pyright: ignore

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> OnGpu:
        place = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        maker: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage]
        made: OnGpu = maker(cls, held.size(), dtype=held.dtype, device=GPU, **place)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} is called on a tensor of the GPU, but the test has left the GPU")

    # Torch's own ways to do these things look for a driver.

    def copy_(self, other: Tensor, non_blocking: bool = False) -> OnGpu:
        made: OnGpu = torch.ops.aten.copy_.default(self, other, non_blocking)
        return made

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        assert not as_tuple
        return torch.ops.aten.nonzero.default(self)

    def __invert__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.bitwise_not.default(self)

    def __getitem__(self, index: Any) -> Any:
        return _mode().wrapped(self.held[_index_there(index)], [self])

    def __setitem__(self, index: Any, value: Any) -> None:
        if _tensors_in(index):
            assert isinstance(value, OnGpu) or not isinstance(value, Tensor), "a GPU cannot use a tensor of the CPU"
            self.held[_index_there(index)] = _held(value)
        elif isinstance(value, Tensor):
            self[index].copy_(value)
        else:
            self[index].fill_(value)

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OnGpu(shape={list(self.shape)}, dtype={self.dtype})"


class StandInGpu(TorchDispatchMode):
    """Within it there is a GPU.

    `allowed`: operations whose last bits are a library's own, by their aten names. `memory_bytes`: beyond it tensors
    raise `torch.OutOfMemoryError`; None for no limit.
    """

    now: StandInGpu | None = None

    def __init__(self, *allowed: str, memory_bytes: int | None = None) -> None:
        mode: Any = super()
        mode.__init__()
        self._memory_bytes = memory_bytes
        # The place of fake tensors among torch's modes: for these torch does not look for a driver of CUDA.
        self._mode_key: Any = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore
        self._allowed = _MOVES | _ONE_RESULT | frozenset(allowed)
        self._n_of = Counter[int]()  # tensors of each memory, by its address
        self._bytes, self.peak_bytes = 0, 0
        self.transfers: list[Transfer] = []

    def __enter__(self) -> StandInGpu:
        """Do what torch's mode of fake tensors does, where there is no driver either."""
        torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
        mode: Any = super()
        self._before: bool = torch_c._only_lift_cpu_tensors()
        torch_c._set_only_lift_cpu_tensors(True)
        mode.__enter__()
        StandInGpu.now = self
        return self

    def __exit__(self, *error: Any) -> None:
        StandInGpu.now = None
        mode: Any = super()
        mode.__exit__(*error)
        torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
        torch_c._set_only_lift_cpu_tensors(self._before)

    @property
    def down(self) -> list[Transfer]:
        """The copies from the GPU to the CPU."""
        return [one for one in self.transfers if one.is_down]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(kwargs or {}), str(func).split(".")[1]
        given = _tensors_in((args, options))
        is_from_gpu = any(isinstance(one, OnGpu) for one in given)
        is_to_gpu = _is_to_gpu(name, given, options)
        if not is_from_gpu and not is_to_gpu:
            return func(*args, **options)
        if name in _COPIES:
            self._note(given, is_to_gpu, options)
        elif given:
            self._require_one_result(name, args, given, options)
        if "device" in options:
            options["device"] = _CPU
        held_args, held_options = tree_map_only(OnGpu, _held, (args, options))
        made = _run(func, name, held_args, held_options)
        return self.wrapped(made, given) if is_to_gpu else made

    def wrapped(self, made: Any, given: list[Tensor]) -> Any:
        """What an operation made of `given`, on the GPU. An operation in place gives the tensor that it got."""
        known = {id(one.held): one for one in given if isinstance(one, OnGpu)}
        return tree_map_only(Tensor, lambda one: known[id(one)] if id(one) in known else self._new(one), made)

    def _new(self, held: Tensor) -> OnGpu:
        address, n_bytes = held.untyped_storage().data_ptr(), held.untyped_storage().nbytes()
        if not self._n_of[address]:
            if self._memory_bytes is not None and self._bytes + n_bytes > self._memory_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {n_bytes} bytes")
            self._bytes += n_bytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._n_of[address] += 1
        made = OnGpu(held)
        weakref.finalize(made, self._gone, address, n_bytes)
        return made

    def _gone(self, address: int, n_bytes: int) -> None:
        self._n_of[address] -= 1
        if not self._n_of[address]:
            self._bytes -= n_bytes

    def _note(self, given: list[Tensor], is_to_gpu: bool, options: Mapping[str, Any]) -> None:
        """Torch converts before it copies, so a copy has the target's type on its way."""
        source, dtype = given[-1], options.get("dtype") or given[0].dtype
        if isinstance(source, OnGpu) != is_to_gpu:
            self.transfers.append(Transfer(not is_to_gpu, dtype, source.numel()))

    def _require_one_result(
        self, name: str, args: tuple[Any, ...], given: list[Tensor], options: Mapping[str, Any]
    ) -> None:
        elsewhere = [one for one in given if not isinstance(one, OnGpu) and one.dim() > 0]
        assert not elsewhere, f"{name}: a GPU cannot use a tensor of the CPU of shape {[*elsewhere[0].shape]}"
        floats = [_held(one) for one in given if one.is_floating_point()]
        if name in _SUMS:
            assert all(_is_sum_exact(one) for one in floats), f"{name}: a library's order decides the last bits"
        elif floats:
            is_square = name in _POWERS and args[1] == 2  # a GPU multiplies
            assert is_square or name in self._allowed, f"{name}: its last bits are a library's own"
            assert options.get("alpha", 1) == 1, f"{name}: a GPU fuses the product with the sum"


def _mode() -> StandInGpu:
    assert StandInGpu.now is not None, "the test has left the GPU"
    return StandInGpu.now


def _is_to_gpu(name: str, given: list[Tensor], options: Mapping[str, Any]) -> bool:
    """Whether the result is on the GPU."""
    if name == "_local_scalar_dense":
        return False
    if options.get("device") is not None:
        return torch.device(options["device"]).type == GPU.type
    if name == "copy_":
        return isinstance(given[0], OnGpu)
    return any(isinstance(one, OnGpu) for one in given)


def _run(func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if name in _QUOTIENTS and not options and not isinstance(args[1], Tensor):
        inverse = 1 / torch.tensor(args[1], dtype=torch.result_type(args[0], 1.0))
        return args[0].mul_(inverse) if name == "div_" else args[0] * inverse
    return func(*args, **options)


def _tensors_in(tree: object) -> list[Tensor]:
    leaves: list[object] = tree_flatten(tree)[0]
    return [one for one in leaves if isinstance(one, Tensor)]


def _held(one: Any) -> Any:
    return one.held if isinstance(one, OnGpu) else one


def _index_there(index: Any) -> Any:
    """An index of what is held. Its tensors must be on the GPU."""
    assert all(isinstance(one, OnGpu) for one in _tensors_in(index)), "a GPU cannot use an index of the CPU"
    return tree_map_only(OnGpu, _held, index)


def _is_sum_exact(values: Tensor) -> bool:
    return bool((values == values.round()).all()) and float(values.double().abs().sum()) < _WHOLE_MAX
