"""Files that survive a kill: written aside, flushed, then renamed into place; readable by their owner alone."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Replace `path` by these bytes, durably: after a crash it holds either the old content or all of the new."""
    aside = path.with_name(path.name + ".tmp")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        write_all(file.fileno(), parts)
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def write_all(fd: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write every byte of every part, without copying (a plain `write` may stop short at 2 GiB)."""
    for part in parts:
        rest = memoryview(part).cast("B") if len(part) else memoryview(b"")
        while rest:
            rest = rest[os.write(fd, rest) :]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex, read in pieces."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Make what others have written to a file durable."""
    _sync(path)


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory durable."""
    _sync(path)


def make_private(path: Path) -> Path:
    """A directory, made if missing, that only its owner may enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
