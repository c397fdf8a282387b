"""A stored update read back in pieces: checked once before it counts, folded once it does. Never whole in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import RawIOBase
from typing import TYPE_CHECKING

from umbel.aggregation.errors import LyingLength, UpdateRefused
from umbel.aggregation.model.layout import PIECE_VALUES
from umbel.server.blobs.blobs import BlobStore
from umbel.server.problems import Refused
from umbel.server.store.stored import Chunk

if TYPE_CHECKING:  # this module is imported before torch
    from torch import Tensor

    from umbel.aggregation.codec.update_codec import UpdateReader


def check_update(blobs: BlobStore, chunks: Sequence[Chunk], sha256: str, codec: UpdateReader, rank: int) -> None:
    """Read an update once: check every value, and hash it. Raises `Refused` or an `UpdateRefused`."""
    if sum(chunk.length for chunk in chunks) not in codec.update_bytes:
        raise LyingLength(f"the model's update has {length_in_words(codec)}")
    with Whole(blobs, chunks) as update:
        try:
            codec.largest_change(_header(update, codec), _pieces(update), rank)
        except UpdateRefused:
            update.require_sha256(sha256)  # damage on the way may look like any fault, and is not the client's
            raise
        update.require_sha256(sha256)


def length_in_words(codec: UpdateReader) -> str:
    """How long an update may be."""
    lengths = codec.update_bytes
    return f"{lengths.start} bytes" if len(lengths) == 1 else f"{lengths.start} to {lengths.stop - 1} bytes"


def largest_change(blobs: BlobStore, chunks: Sequence[Chunk], codec: UpdateReader, rank: int) -> float:
    """The largest change of one value. Raises an `UpdateRefused` at the first thing that is wrong."""
    with Whole(blobs, chunks) as update:
        return codec.largest_change(_header(update, codec), _pieces(update), rank)


def integers(blobs: BlobStore, chunks: Sequence[Chunk], codec: UpdateReader, rank: int) -> Iterator[Tensor]:
    """All that an update adds to the sum, in pieces. Raises an `UpdateRefused` at the first thing that is wrong.

    Folding checks again: the check is cheap, and a file that has changed since must fail the fold, not enter the sum.
    """
    with Whole(blobs, chunks) as update:
        yield from codec.integers(_header(update, codec), _pieces(update), rank)


class Whole(RawIOBase):
    """The chunks of an update read one after the other, as if they were one file."""

    def __init__(self, blobs: BlobStore, chunks: Sequence[Chunk]) -> None:
        self._blobs = blobs
        self._left = list(reversed(chunks))
        self._open = ExitStack()
        self._file: RawIOBase | None = None
        self._sha = hashlib.sha256()  # of what was read

    def require_sha256(self, sha256: str) -> None:
        """Read the rest. Raises `Refused` unless the whole hashes to this."""
        buffer = memoryview(bytearray(4 * PIECE_VALUES))
        while self.readinto(buffer):
            pass
        if self._sha.hexdigest() != sha256:
            raise Refused("wrong-digest", "the whole update does not hash to its Repr-Digest; upload it again")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]  # any buffer is more than it takes
        while True:
            if self._file is not None and (n_bytes := self._file.readinto(buffer)):
                self._sha.update(buffer[:n_bytes])
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


def _header(update: Whole, codec: UpdateReader) -> bytes:
    header = memoryview(bytearray(codec.header_bytes))
    return bytes(header[: fill(update, header)])


def _pieces(update: Whole) -> Iterator[memoryview]:
    """What follows the header. Each piece is overwritten by the next."""
    buffer = memoryview(bytearray(4 * PIECE_VALUES))
    while n_bytes := fill(update, buffer):
        yield buffer[:n_bytes]
