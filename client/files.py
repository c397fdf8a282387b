"""Files that survive a kill: written aside, flushed, then renamed into place; only their owner may read them.

The state directory holds what a client trusts and what it has revealed, so no other user of the machine may read or
change it. Systems without Unix owners skip these checks.
"""

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from umbel.client.errors import StateError

log = logging.getLogger("umbel.client")


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """Replace `path` by these bytes, durably: after a crash it holds either the old content or all of the new."""
    aside = path.with_name(path.name + ".tmp")
    aside.unlink(missing_ok=True)  # left by a crash, or by another user, who would stay its owner
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
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
    """Make a file that others wrote durable."""
    _sync(path)


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory durable."""
    _sync(path)


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
            f"{path} is shared by all users of this machine; name a directory inside it, which is then made"
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
            f"{path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}: that user could "
            "change what is in it; run this as its owner, or name another directory with --state"
        )


def _close(path: Path, mode: int) -> None:
    try:
        path.chmod(0o700)
    except OSError as error:
        raise StateError(
            f"others can look into {path}, and it cannot be closed to them ({error.strerror}): run "
            f"`chmod 700 {path}` as its owner, or name a directory inside it, which is then made"
        ) from error
    if mode & 0o022:
        log.warning("others could write into %s until now; check that what is in it is yours", path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
