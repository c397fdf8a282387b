"""Messages between a process and one that it started: JSON, arrays and file descriptors over a pair of UNIX sockets.

    offset  size
         0     8   n, little-endian
         8     n   JSON: "kind", other fields, and "arrays": dtype and shape of each
       8+n         the arrays' bytes, one after another

Nothing is unpickled, though both ends are our own processes.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FDS_MAX = 8
_HEADER_BYTES_MAX = 1 << 28
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """`arrays` can be written to: each receiver has its own."""

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

    def receive(self) -> ChannelMessage:
        """Wait for the next message. Raises `EOFError` if the other end is gone.

        If the other end writes something else, raises `ValueError`, `TypeError`, `LookupError`, `OverflowError` or
        `MemoryError`.
        """
        try:
            start, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _FDS_MAX)
            if not start:
                raise EOFError
            (length,) = _LENGTH.unpack(start + self._exactly(_LENGTH.size - len(start)))
            if length > _HEADER_BYTES_MAX:
                raise ValueError(f"a header of {length} bytes")
            fields = json.loads(self._exactly(length))
            arrays = [self._array(np.dtype(name), shape) for name, shape in fields.pop("arrays")]
        except ConnectionError as error:
            raise EOFError from error
        return ChannelMessage(fields.pop("kind"), fields, arrays, fds)

    def shut_down(self) -> None:
        """End what another thread sends or receives at this moment."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)

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
