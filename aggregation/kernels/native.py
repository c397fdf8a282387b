"""The compiled kernels (kernels.cpp): found, checked and chosen once, and called through ctypes, without the GIL.

`UMBEL_KERNELS` = `torch`, `generic`, `avx2` or `avx512` forces a path. The default is the machine's best path. If the
library was not compiled, or has another version, torch computes the same integers, and one log line says so.

Nothing here checks arguments: a wrong length writes into other memory. Codecs call `kernels.py`, which checks.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from umbel.aggregation.kernels.arguments import Blocks, Quantizer

if TYPE_CHECKING:  # a coordinator imports this before torch
    from torch import Tensor

log = logging.getLogger("umbel.aggregation")
ABI = 3  # kernels.cpp has the same number: raise both whenever a function changes
FILE = "kernels.native.so"
VARIABLE = "UMBEL_KERNELS"
_REMEDY = (
    "install a C++ compiler (g++ or clang), then install umbel again; until then torch computes the same results, more "
    "slowly"
)


class Path(StrEnum):
    """The instructions to compute with, from the slowest on."""

    TORCH = "torch"
    GENERIC = "generic"
    AVX2 = "avx2"
    AVX512 = "avx512"


class NoKernels(Exception):
    """The compiled kernels cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class Folded:
    """Facts about levels that were added: the sum of their squares, and the greatest magnitude."""

    sum_of_squares: int
    greatest: int


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Facts about symbols that were read."""

    n_escapes: int  # the number of excesses that they need
    is_within: bool  # whether all levels fit 16 bits
    is_filled_with_zeros: bool  # whether the padding of the last bytes is zero
    folded: Folded


class _Blocks(ctypes.Structure):
    _fields_ = (("n_values", ctypes.c_int64), ("n_blocks", ctypes.c_int64), ("side", ctypes.c_int64))


class _Quantizer(ctypes.Structure):
    _fields_ = (
        ("inverse_step", ctypes.c_float),
        ("phi", ctypes.c_int32),
        ("low", ctypes.c_int32),
        ("high", ctypes.c_int32),
        ("offset", ctypes.c_int32),
    )


class _Folded(ctypes.Structure):
    _fields_ = (("sum_of_squares", ctypes.c_int64), ("greatest", ctypes.c_int64))


class _Unpacked(ctypes.Structure):
    _fields_ = (
        ("n_escapes", ctypes.c_int64),
        ("is_within", ctypes.c_int64),
        ("is_filled_with_zeros", ctypes.c_int64),
        ("folded", _Folded),
    )


_POINTER, _KEY, _PLACE, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "rotate": (_POINTER, _Blocks, _KEY, _PLACE, _PLACE, _POINTER),
    "unrotate": (_POINTER, _Blocks, _KEY, _PLACE, _PLACE, _POINTER),
    "unrotate_double": (_POINTER, _Blocks, _KEY, _PLACE, _PLACE, _POINTER),
    "signs": (_KEY, _PLACE, _PLACE, _POINTER),
    "dither": (_KEY, _PLACE, _PLACE, _POINTER),
    "words": (_KEY, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, _POINTER),
    "quantize_int32": (_POINTER, _KEY, _PLACE, _PLACE, _Quantizer, _POINTER),
    "quantize_int16": (_POINTER, _KEY, _PLACE, _PLACE, _Quantizer, _POINTER),
    "pack_quantized": (_POINTER, _KEY, _PLACE, _PLACE, _Quantizer, _INT, _POINTER),
    "pack_rotated": (_POINTER, _Blocks, _KEY, _KEY, _PLACE, _PLACE, _Quantizer, _INT, _POINTER),
    "fold_int32": (_POINTER, _PLACE, _INT, _INT, _POINTER, ctypes.POINTER(_Folded)),
    "fold_int64": (_POINTER, _PLACE, _INT, _INT, _POINTER, ctypes.POINTER(_Folded)),
    "pack_int32": (_POINTER, _PLACE, _INT, _POINTER),
    "add_packed_int32": (_POINTER, _PLACE, _INT, _POINTER),
    "add_levels": (_POINTER, _PLACE, _INT, _POINTER),
    "mix_dither": (_POINTER, _KEY, _INT, _PLACE, _PLACE),
    "count_classes": (_POINTER, _PLACE, _POINTER),
    "by_class": (_POINTER, _POINTER, _PLACE, _POINTER, _POINTER),
    "in_place": (_POINTER, _POINTER, _PLACE, _POINTER, _POINTER),
    "pack_symbols": (_POINTER, _PLACE, _INT, _POINTER, _POINTER, ctypes.POINTER(ctypes.c_int64)),
    "unpack_symbols": (_POINTER, _PLACE, _INT, _POINTER, _PLACE, _POINTER, ctypes.POINTER(_Unpacked)),
}


class Library:
    """The compiled kernels of all paths."""

    def __init__(self, file: str) -> None:
        """Raises `NoKernels`."""
        try:
            self._library = ctypes.CDLL(file)
            abi = int(self._library.umbel_abi())
        except (OSError, AttributeError) as error:
            raise NoKernels(f"the compiled kernels cannot be loaded ({error})") from error
        if abi != ABI:
            raise NoKernels(f"the compiled kernels have version {abi}, and this umbel needs version {ABI}")
        found = int(self._library.umbel_paths())
        self.paths = tuple(path for bit, path in enumerate((Path.GENERIC, Path.AVX2, Path.AVX512)) if found >> bit & 1)

    def kernels(self, path: Path) -> Kernels:
        """The kernels of one path. Raises `NoKernels` for a path that the machine lacks."""
        if path not in self.paths:
            raise NoKernels(
                f"this machine has no {path} kernels; {VARIABLE} can be {', '.join(('torch', *self.paths))}"
            )
        functions: dict[str, Any] = {}
        for name, signature in _SIGNATURES.items():
            functions[name] = getattr(self._library, f"umbel_{path}_{name}")
            functions[name].argtypes, functions[name].restype = signature, None
        return Kernels(path, functions)


class Kernels:
    """The functions of one path. Tensors are contiguous, on the CPU, of the type and length that each states."""

    def __init__(self, path: Path, functions: dict[str, Any]) -> None:
        self.path = path
        self._functions = functions

    def rotate(self, out: Tensor, values: Tensor, blocks: Blocks, key: int, first: int) -> None:
        """Fill `out` with the rotated vector from position `first` on. All float32."""
        self._functions["rotate"](_at(values), _blocks(blocks), key, first, out.numel(), _at(out))

    def unrotate(self, out: Tensor, rotated: Tensor, blocks: Blocks, key: int, first: int) -> None:
        """Write the coordinates of `out` that belong to `rotated`, the rotated vector from position `first` on.

        Both float32 or float64.
        """
        name = "unrotate_double" if rotated.element_size() == 8 else "unrotate"
        self._functions[name](_at(rotated), _blocks(blocks), key, first, rotated.numel(), _at(out))

    def signs(self, out: Tensor, key: int, first: int) -> None:
        """float32."""
        self._functions["signs"](key, first, out.numel(), _at(out))

    def dither(self, out: Tensor, key: int, first: int) -> None:
        """int32."""
        self._functions["dither"](key, first, out.numel(), _at(out))

    def words(self, out: Tensor, key: int, counter: tuple[int, int, int, int]) -> None:
        """The four words of 16 blocks from this counter on, one row for each word. int32, 4 x 16."""
        block = counter[0] | counter[1] << 32
        self._functions["words"](key, counter[2], counter[3], block, _at(out))

    def quantize(self, out: Tensor, values: Tensor, quantizer: Quantizer, first: int) -> None:
        """float32 -> int32 or int16, as `out` is."""
        name = "quantize_int16" if out.element_size() == 2 else "quantize_int32"
        struct = _quantizer(quantizer)
        self._functions[name](_at(values), quantizer.key, first, values.numel(), struct, _at(out))

    def pack(self, out: Tensor, values: Tensor, quantizer: Quantizer, bits: int, first: int) -> None:
        """float32 -> the lowest `bits` of the levels, packed into uint8."""
        struct = _quantizer(quantizer)
        self._functions["pack_quantized"](_at(values), quantizer.key, first, values.numel(), struct, bits, _at(out))

    def rotate_and_pack(
        self,
        out: Tensor,
        values: Tensor,
        blocks: Blocks,
        sign_key: int,
        quantizer: Quantizer,
        bits: int,
        part: tuple[int, int],
    ) -> None:
        """`pack` of a part of the rotated vector. `part`: its first position, and its number of positions."""
        structs = (_blocks(blocks), sign_key, quantizer.key, *part, _quantizer(quantizer))
        self._functions["pack_rotated"](_at(values), *structs, bits, _at(out))

    def fold(self, sums: Tensor, data: Tensor, bits: int, weight: int) -> Folded:
        """Adds weight * level to `sums`, int32 or int64. `weight` must fit 32 bits."""
        name = "fold_int64" if sums.element_size() == 8 else "fold_int32"
        folded = _Folded()
        self._functions[name](_at(data), sums.numel(), bits, weight, _at(sums), ctypes.byref(folded))
        return Folded(folded.sum_of_squares, folded.greatest)

    def pack_integers(self, out: Tensor, integers: Tensor, bits: int) -> None:
        """int32 -> the lowest `bits`, 1 to 32, packed into uint8."""
        self._functions["pack_int32"](_at(integers), integers.numel(), bits, _at(out))

    def add_packed(self, sums: Tensor, data: Tensor, bits: int) -> None:
        """Adds what `pack_integers` packed to `sums`, int32, which wrap."""
        self._functions["add_packed_int32"](_at(data), sums.numel(), bits, _at(sums))

    def add_levels(self, sums: Tensor, levels: Tensor, weight: int) -> None:
        """Adds weight * level, int32, to `sums`, int64. `weight` must fit 32 bits."""
        self._functions["add_levels"](_at(levels), levels.numel(), weight, _at(sums))

    def mix_dither(self, classes: Tensor, key: int, phi: int, first: int) -> None:
        """uint8: energies become class bytes."""
        self._functions["mix_dither"](_at(classes), key, phi, first, classes.numel())

    def count_classes(self, counts: Tensor, classes: Tensor) -> None:
        """uint8 -> int64, 4 x 32."""
        self._functions["count_classes"](_at(classes), classes.numel(), _at(counts))

    def by_class(self, folded: Tensor, levels: Tensor, classes: Tensor, starts: Tensor) -> None:
        """int32 -> int16. `starts` must be those of these classes."""
        self._functions["by_class"](_at(levels), _at(classes), levels.numel(), _at(starts), _at(folded))

    def in_place(self, levels: Tensor, folded: Tensor, classes: Tensor, starts: Tensor) -> None:
        """int16 -> int32. `starts` must be those of these classes."""
        self._functions["in_place"](_at(folded), _at(classes), levels.numel(), _at(starts), _at(levels))

    def pack_symbols(self, packed: Tensor, excesses: Tensor, folded: Tensor, width: int) -> int:
        """int16 -> uint8, and int16 excesses, for which there must be as much room as for `folded`; their number."""
        n_escapes = ctypes.c_int64()
        symbols = (_at(folded), folded.numel(), width)
        self._functions["pack_symbols"](*symbols, _at(packed), _at(excesses), ctypes.byref(n_escapes))
        return n_escapes.value

    def unpack_symbols(self, folded: Tensor, packed: Tensor, width: int, excesses: Tensor) -> Unpacked:
        """uint8 and int16 excesses -> int16."""
        made, symbols = _Unpacked(), (_at(packed), folded.numel(), width)
        come = (_at(excesses), excesses.numel())
        self._functions["unpack_symbols"](*symbols, *come, _at(folded), ctypes.byref(made))
        whole = Folded(made.folded.sum_of_squares, made.folded.greatest)
        return Unpacked(made.n_escapes, bool(made.is_within), bool(made.is_filled_with_zeros), whole)


def is_torch_forced() -> bool:
    """Whether `UMBEL_KERNELS` asks for plain torch on any device."""
    return os.environ.get(VARIABLE) == Path.TORCH


@cache
def library() -> Library:
    """The library that was compiled when umbel was installed. Raises `NoKernels`."""
    file = resources.files("umbel.aggregation.kernels") / FILE
    if not file.is_file():
        raise NoKernels("umbel was installed without its compiled kernels")
    return Library(str(file))


@cache
def chosen() -> Kernels | None:
    """The kernels to compute with, or None for torch. Raises `NoKernels` if `UMBEL_KERNELS` names a missing path."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted not in tuple(Path):
        raise NoKernels(f"{VARIABLE} is {wanted!r}; it can be {', '.join(Path)}")
    if wanted:
        return None if wanted == Path.TORCH else library().kernels(Path(wanted))
    try:
        paths = library().paths
        if not paths:
            raise NoKernels("the compiled kernels do not support this machine's processor")
        return library().kernels(paths[-1])
    except NoKernels as error:
        log.warning("%s: %s", error, _REMEDY)
        return None


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _blocks(blocks: Blocks) -> _Blocks:
    return _Blocks(blocks.n_values, blocks.n_blocks, blocks.side)


def _quantizer(quantizer: Quantizer) -> _Quantizer:
    levels = quantizer.levels
    return _Quantizer(quantizer.inverse_step, quantizer.phi, levels.low, levels.high, levels.offset)
