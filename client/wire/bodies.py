"""Request bodies that are read from disk as they are sent, so that none of them is in memory whole."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class FileBody:
    """`n_bytes` of an open file from `first` on. For one thread at a time; the file is to stay as it is."""

    file: BinaryIO
    first: int
    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes

    def pieces(self) -> Iterator[bytes]:
        """Raises `EOFError` for a file that has become shorter."""
        self.file.seek(self.first)
        left = self.n_bytes
        while left:
            piece = self.file.read(min(_PIECE_BYTES, left))
            if not piece:
                raise EOFError("the file became shorter while it was sent")
            left -= len(piece)
            yield piece


Body = bytes | FileBody


def sha256_of(body: Body) -> bytes:
    """The body's SHA-256, 32 bytes."""
    if isinstance(body, bytes):
        return hashlib.sha256(body).digest()
    digest = hashlib.sha256()
    for piece in body.pieces():
        digest.update(piece)
    return digest.digest()
