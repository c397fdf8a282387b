"""A stored update read back in pieces: checked once before it counts, folded once it does. Never whole in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import RawIOBase
from typing import TYPE_CHECKING

from umbel.aggregation.errors import LyingLength
from umbel.aggregation.grid import CHUNK_VALUES, Grid, check_values
from umbel.aggregation.layout import Layout
from umbel.aggregation.torch_later import torch
from umbel.aggregation.wire import HEADER_BYTES, Codec, expected_bytes, read_header
from umbel.server.blobs import BlobStore
from umbel.server.problems import Refused
from umbel.server.stored import Chunk

if TYPE_CHECKING:
    from torch import Tensor


def check_update(blobs: BlobStore, chunks: Sequence[Chunk], sha256: str, layout: Layout, grid: Grid) -> None:
    """Hash the whole update, read its header, and check every value. Raises `Refused` or an `UpdateRefused`."""
    expected = expected_bytes(Codec.FLOAT32, layout.n_values)
    if sum(chunk.length for chunk in chunks) != expected:
        raise LyingLength(f"the model's update has {expected} bytes")
    if _sha256(blobs, chunks) != sha256:
        raise Refused("wrong-digest", "the whole update does not hash to its Repr-Digest; upload it again")
    with Whole(blobs, chunks) as update:
        header = memoryview(bytearray(HEADER_BYTES))
        read_header(bytes(header[: fill(update, header)]), layout)
    for _ in checked_values(blobs, chunks, grid):
        pass


def checked_values(blobs: BlobStore, chunks: Sequence[Chunk], grid: Grid) -> Iterator[Tensor]:
    """The values of an update, in pieces. Raises an `UpdateRefused` at the first that does not stand on the grid.

    Folding checks again: the check is cheap, and a file that has changed since must fail the fold, not enter the sum.
    """
    first = 0
    for values in _values(blobs, chunks):
        check_values(values, grid, first)
        yield values
        first += values.numel()


class Whole(RawIOBase):
    """The chunks of an update read one after the other, as if they were one file."""

    def __init__(self, blobs: BlobStore, chunks: Sequence[Chunk]) -> None:
        self._blobs = blobs
        self._left = list(reversed(chunks))
        self._open = ExitStack()
        self._file: RawIOBase | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]  # any buffer is more than it takes
        while True:
            if self._file is not None and (n_bytes := self._file.readinto(buffer)):
                return n_bytes
            self._open.close()
            self._file = None
            if not self._left:
                return 0
            self._file = self._open.enter_context(self._blobs.open(self._left.pop().key))

    def close(self) -> None:
        self._open.close()
        super().close()


def fill(file: RawIOBase, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends; how many bytes came. Reads may be short at any time."""
    filled = 0
    while filled < len(buffer) and (n_bytes := file.readinto(buffer[filled:])):
        filled += n_bytes
    return filled


def _sha256(blobs: BlobStore, chunks: Sequence[Chunk]) -> str:
    sha, buffer = hashlib.sha256(), memoryview(bytearray(4 * CHUNK_VALUES))
    with Whole(blobs, chunks) as update:
        while n_bytes := fill(update, buffer):
            sha.update(buffer[:n_bytes])
    return sha.hexdigest()


def _values(blobs: BlobStore, chunks: Sequence[Chunk]) -> Iterator[Tensor]:
    """The float32 values of an update, in pieces. Each piece is overwritten by the next.

    Values are little-endian on the wire and, on every machine that torch runs on, in memory.
    """
    buffer = memoryview(bytearray(4 * CHUNK_VALUES))
    with Whole(blobs, chunks) as update:
        fill(update, memoryview(bytearray(HEADER_BYTES)))
        while n_bytes := fill(update, buffer):
            yield torch.frombuffer(buffer[:n_bytes], dtype=torch.float32)
