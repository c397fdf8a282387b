"""Files by their SHA-256, in a local directory: written once, never changed.

A file appears under its name only when it is whole and on disk: written elsewhere, synced, renamed, directory synced.
"""

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Blob:
    """A stored file. `sha256`: hex."""

    sha256: str
    size_bytes: int


class BlobStore:
    """A directory of blobs and, beside them, of files in the making."""

    def __init__(self, directory: Path) -> None:
        self._blobs = directory
        self._making = directory / "making"

    def prepare(self) -> None:
        """Make the directories, and drop what a crash left in the making."""
        self._making.mkdir(parents=True, exist_ok=True)
        for left in self._making.iterdir():
            left.unlink()

    def path(self, sha256: str) -> Path:
        """Where a blob is, or would be."""
        if not _SHA256.fullmatch(sha256):
            raise ValueError("a blob's name is 64 lower-case hex digits")
        return self._blobs / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    @contextmanager
    def making(self) -> Generator[Path]:
        """A path to write a new file to; hand it to `keep` within the block, or it is dropped."""
        path = self._making / secrets.token_hex(16)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def keep_as(self, path: Path, sha256: str) -> Blob | None:
        """`keep`, but only if the file hashes to `sha256`; None otherwise."""
        return self.keep(path) if file_sha256(path) == sha256 else None

    def keep(self, path: Path) -> Blob:
        """Make a finished file a blob. Blocks for as long as the disk takes."""
        blob = Blob(file_sha256(path), path.stat().st_size)
        sync_file(path)
        path.replace(self.path(blob.sha256))
        sync_file(self._blobs)
        return blob


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    sha = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            sha.update(piece)
    return sha.hexdigest()


def sync_file(path: Path) -> None:
    """Have a file, or a directory's entries, on disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a small file that only its owner can read, whole or not at all."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
    sync_file(path.parent)
