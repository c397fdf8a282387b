"""Read and write a safetensors file in pieces, without holding the model in memory.

It uses plain reads and writes, because the touched pages of a mapped file count as resident memory. Use it only for
files that the safetensors library has written or checked.
"""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from torch import Tensor

from umbel.aggregation.model.artifact import tensor_offsets


class TensorFile:
    """An open safetensors file. Use it in a `with` block."""

    def __init__(self, path: Path, is_writable: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
        n_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        self._offsets = tensor_offsets(os.pread(self._file, n_bytes, 8))

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        """Values `first` to `first + n_values` of a tensor of `dtype`, as one dimension."""
        buffer = bytearray(n_values * dtype.itemsize)
        n_read = os.preadv(self._file, [buffer], self._offsets[name] + first * dtype.itemsize)
        if n_read != len(buffer):
            raise OSError(f"the model file is shorter than its header says at tensor {name!r}")
        return torch.frombuffer(buffer, dtype=dtype)

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Overwrite the values from `first` on with `values`: one dimension, in the tensor's dtype."""
        data = values.contiguous().view(torch.uint8).numpy()
        n_written = os.pwrite(self._file, data.data, self._offsets[name] + first * values.dtype.itemsize)
        if n_written != data.nbytes:
            raise OSError(f"the disk took {n_written} of {data.nbytes} bytes of tensor {name!r}")


def write_skeleton(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: dict[str, str]
) -> None:
    """Create a safetensors file of zeros, for `TensorFile.write` to fill."""

    save_file({name: _zeros(shape, dtype) for name, (shape, dtype) in tensors.items()}, path, metadata)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory: private pages that are only read all map to one zero page of the kernel."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).reshape(shape)
