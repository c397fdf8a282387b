"""Files by their SHA-256, in a local directory: written once, never changed.

A file appears under its name only when it is whole and on disk: written elsewhere, synced, renamed, directory synced.
"""

import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from umbel.aggregation.types import require_sha256
from umbel.server.files import file_sha256, sync_file


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
        require_sha256(sha256, "a blob's name")
        return self._blobs / sha256

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
