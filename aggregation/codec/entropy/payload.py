"""Payloads as bytes: float32 and bfloat16, little-endian, and a reader that takes exactly what the plan expects."""

import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TypeAlias

import torch
from torch import Tensor

from umbel.aggregation.errors import LyingLength, MalformedUpdate, NonFiniteUpdate

Buffer: TypeAlias = bytes | memoryview
_PIECE_BYTES = 1 << 20
if sys.byteorder != "little":
    raise ImportError("payloads are little-endian, so umbel needs a little-endian machine")


class Precision(StrEnum):
    """How a value is written. bfloat16 is rounded to nearest, ties to even, and cut to its largest finite value."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def n_bytes(self) -> int:
        return 4 if self is Precision.FLOAT32 else 2

    def written(self, values: Tensor) -> Tensor:
        """float32 -> uint8."""
        if self is Precision.FLOAT32:
            return values.contiguous().view(torch.uint8)
        most = torch.finfo(torch.bfloat16).max
        return values.clamp(-most, most).to(torch.bfloat16).view(torch.uint8)

    def read(self, data: Tensor) -> Tensor:
        """uint8 -> float32. Raises `NonFiniteUpdate`."""
        dtype = torch.float32 if self is Precision.FLOAT32 else torch.bfloat16
        return require_finite(data.contiguous().view(dtype).to(torch.float32))


def bytes_of(data: Tensor) -> Iterator[bytes]:
    """The bytes of a uint8 tensor on any device, in pieces of 1 MiB."""
    for piece in torch.split(data.cpu(), _PIECE_BYTES):
        yield piece.numpy().tobytes()


def require_finite(values: Tensor) -> Tensor:
    """Raise `NonFiniteUpdate` for a NaN or an infinity."""
    if not bool(values.isfinite().all()):
        raise NonFiniteUpdate(
            "the update contains a NaN or an infinity, or a scale so large that a value becomes infinite"
        )
    return values


def scales_written(scales: Tensor) -> Tensor:
    """float64 or float32 -> float32 as uint8. Raises `ValueError` for values that are too large."""
    narrow = scales.to(torch.float32)
    if not bool(narrow.isfinite().all()):
        raise ValueError("the weight change is too large to be scaled in float32; train with a lower learning rate")
    return narrow.contiguous().view(torch.uint8)


def at_most(pieces: Iterable[Buffer], n_bytes_max: int) -> Iterator[Buffer]:
    """The pieces. Raises `LyingLength` beyond `n_bytes_max`: empty blocks can make a Zstandard frame endless."""
    n_left = n_bytes_max
    for piece in pieces:
        n_left -= len(piece)
        if n_left < 0:
            raise LyingLength(f"the payload is longer than {n_bytes_max} bytes")
        yield piece


def exactly(pieces: Iterable[Buffer], n_bytes: int) -> Iterator[Buffer]:
    """The pieces. Raises `LyingLength` for another total length, at the latest after the last piece."""
    n_left = n_bytes
    for piece in pieces:
        n_left -= len(piece)
        if n_left < 0:
            break
        yield piece
    if n_left:
        raise LyingLength(
            f"the payload has {'more' if n_left < 0 else 'fewer'} bytes than the {n_bytes} that its header states"
        )


class Payload:
    """Reads a payload that comes in pieces. It holds one piece, and the bytes that were asked for."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self._pieces = iter(pieces)
        self._pending = memoryview(b"")

    def take(self, n_bytes: int) -> Tensor:
        """The next `n_bytes` bytes: uint8. Raises `LyingLength` if there are fewer.

        `n_bytes` must come from the plan, or be compared with it before.
        """
        taken = bytearray()
        while (n_missing := n_bytes - len(taken)) > 0:
            if not self._pending and not self._next():
                raise LyingLength(f"the payload ends too early: {n_missing} bytes are missing")
            taken += self._pending[:n_missing]
            self._pending = self._pending[n_missing:]
        return torch.frombuffer(taken, dtype=torch.uint8) if taken else torch.empty(0, dtype=torch.uint8)

    def rest(self) -> Iterator[Buffer]:
        if self._pending:
            pending, self._pending = self._pending, memoryview(b"")
            yield pending
        yield from self._pieces

    def take_rest(self, n_bytes_max: int) -> Tensor:
        """The rest. Raises `LyingLength` if it is longer than `n_bytes_max`."""
        taken = bytearray()
        while self._pending or self._next():
            if len(taken) + len(self._pending) > n_bytes_max:
                raise LyingLength(f"the payload is too long: its last part has more than {n_bytes_max} bytes")
            taken += self._pending
            self._pending = memoryview(b"")
        return torch.frombuffer(taken, dtype=torch.uint8) if taken else torch.empty(0, dtype=torch.uint8)

    def take_scales(self, n_scales: int) -> Tensor:
        """The next scales: float32, finite and not negative. Raises `NonFiniteUpdate` or `MalformedUpdate`."""
        scales = Precision.FLOAT32.read(self.take(4 * n_scales))
        if bool((scales < 0).any()):
            raise MalformedUpdate("the payload has a negative scale")
        return scales

    def end(self) -> None:
        """Raise `LyingLength` if bytes are left."""
        if self._pending or self._next():
            raise LyingLength("there are bytes after the end of the payload")

    def _next(self) -> bool:
        """Whether there was another piece that is not empty."""
        for piece in self._pieces:
            if piece:
                self._pending = memoryview(piece)
                return True
        return False
