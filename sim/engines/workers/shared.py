"""Tensors that several processes of one machine see: memory without a name, which ends with the last who holds it.

A file descriptor stands for it, and goes to another process over a socket (`channel.py`). Nothing can be left behind,
not by a process that is killed either.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class SharedTensor:
    """`tensor`: to read and write. `fd`: to be sent; closed with `close`, while the tensor lives on as long as used."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        n_bytes = prod(shape) * dtype.itemsize
        self.fd = _nameless(max(n_bytes, 1))
        self.tensor = mapped(self.fd, shape, dtype)

    @classmethod
    def of(cls, tensor: Tensor) -> "SharedTensor":
        """A copy of `tensor`."""
        shared = cls(tensor.shape, tensor.dtype)
        shared.tensor.copy_(tensor)
        return shared

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        self.close()


def mapped(fd: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The shared tensor behind a descriptor, which may be closed then."""
    if prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(fd, prod(shape) * dtype.itemsize), dtype=dtype).view(tuple(shape))


def _nameless(n_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("umbel")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, n_bytes)
    return fd
