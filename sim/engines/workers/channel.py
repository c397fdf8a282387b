"""What an engine and its worker processes exchange: messages over a socket, and tensors in shared memory.

A message is a table of JSON, arrays, and file descriptors:

    offset  size
         0     8   n, little-endian
         8     n   JSON: "kind", other fields, and "arrays": dtype and shape of each
       8+n         the arrays' bytes, one after another

Nothing is unpickled, though both ends are our own processes. Shared memory has no name, only a file descriptor, which
goes to another process in a message. It ends with its last holder, so even a killed process leaves nothing behind.
"""

import json
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FDS_MAX = 8
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    kind: str
    fields: Mapping[str, Any]
    arrays: Sequence[NDArray[Any]]
    fds: Sequence[int]


class Channel:
    """One end of a connected pair of UNIX sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self, kind: str, fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]] = (), fds: Sequence[int] = ()
    ) -> None:
        """Raises `OSError` if the other end is gone."""
        described = [[array.dtype.str, list(array.shape)] for array in arrays]
        header = json.dumps({**fields, "kind": kind, "arrays": described}).encode()
        socket.send_fds(self._socket, [_LENGTH.pack(len(header))], fds)
        self._socket.sendall(header)
        for array in arrays:
            self._socket.sendall(array.tobytes())

    def receive(self) -> WorkerMessage:
        """Wait for the next message. Raises `EOFError` if the other end is gone."""
        try:
            start, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _FDS_MAX)
            if not start:
                raise EOFError
            (length,) = _LENGTH.unpack(start + self._exactly(_LENGTH.size - len(start)))
            fields = json.loads(self._exactly(length))
            arrays = [self._array(np.dtype(name), shape) for name, shape in fields.pop("arrays")]
        except ConnectionError as error:
            raise EOFError from error
        return WorkerMessage(fields.pop("kind"), fields, arrays, fds)

    def close(self) -> None:
        self._socket.close()

    def _array(self, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        return np.frombuffer(self._exactly(prod(shape) * dtype.itemsize), dtype).reshape(shape)

    def _exactly(self, n_bytes: int) -> bytearray:
        data = bytearray(n_bytes)
        view = memoryview(data)
        while view:
            if not (n := self._socket.recv_into(view)):
                raise EOFError
            view = view[n:]
        return data


class SharedTensor:
    """A tensor in shared memory. `fd` can be sent; after `close` the tensor stays usable."""

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
    """The shared tensor behind a descriptor, which can be closed afterwards."""
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
