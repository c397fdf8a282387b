"""Files that survive a kill: written aside, flushed, then renamed into place; only their owner may read them.

Systems without Unix owners skip the checks of owners and modes.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from umbel.client.errors import StateError

T = TypeVar("T")
log = logging.getLogger("umbel.client")


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Replace `path` by these bytes, durably: after a crash it holds either the old content or all of the new."""
    aside = path.with_name(path.name + ".tmp")
    aside.unlink(missing_ok=True)  # left by a crash, or by another user, who would stay its owner
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.writelines(parts)
        flush(file)
    aside.replace(path)
    sync(path.parent)


@dataclass(frozen=True, slots=True)
class JsonFile(Generic[T]):
    """One value, kept in a JSON file."""

    path: Path
    adapter: TypeAdapter[T]
    if_damaged: str = "remove it and start again"  # what a person should do, as the end of a sentence

    def read(self) -> T | None:
        """The value; None if there is no file. Raises `StateError` for a damaged one."""
        try:
            return self.adapter.validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValidationError, OSError) as error:
            raise StateError(f"{self.path} is damaged; {self.if_damaged}") from error

    def write(self, value: T) -> None:
        """Replace the value, durably."""
        make_private(self.path.parent)
        write_atomically(self.path, self.adapter.dump_json(value))


@contextlib.contextmanager
def locked_file(path: Path, waits: bool = True) -> Generator[None]:
    """Hold the lock of a file, made if it is missing. Threads and processes that name the same file take turns.

    Not `waits`: raise `BlockingIOError` if another one holds it. The lock ends with the block, or with the process.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)  # closing releases the lock


def flush(file: BinaryIO) -> None:
    """Make what was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex, read in pieces."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file durable, or the renames and removals in a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private(path: Path) -> Path:
    """Make a directory if it is missing, and close it to other users.

    Raises `StateError` if it, a link to it, or an entry belongs to another user, if all users share it, or if it cannot
    be closed.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return path
    require_own(path, path.lstat())  # the owner of a link decides where it leads
    require_own(path, found := path.stat())
    if found.st_mode & stat.S_ISVTX:
        raise StateError(
            f"{path} is shared by all users of this machine; name a directory inside it, and umbel makes it"
        )
    if found.st_mode & 0o077:
        _close(path, found.st_mode)
    for entry in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread renamed it
            require_own(entry, entry.lstat())
    return path


def require_own(path: Path, found: os.stat_result) -> None:
    """Raise `StateError` unless this file or directory belongs to this process's user, or to root."""
    if hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0):
        raise StateError(
            f"{path} belongs to user {found.st_uid}, but this process runs as user {os.geteuid()}, so user "
            f"{found.st_uid} could change its contents. Run this command as user {found.st_uid}, or name another "
            "directory with --state"
        )


def _close(path: Path, mode: int) -> None:
    try:
        path.chmod(0o700)
    except OSError as error:
        raise StateError(
            f"other users can read {path}, and its mode cannot be changed ({error.strerror}): run "
            f"`chmod 700 {path}` as its owner, or name a directory inside it, and umbel makes it"
        ) from error
    if mode & 0o022:
        log.warning("other users could write into %s until now; check that you made all files in it", path)
