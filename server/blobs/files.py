"""Files: hashed in pieces, synced to disk, private if secret; and scratch files, which vanish after a crash."""

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_SCRATCH_NAME = "file"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex, read in pieces."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Sync a file, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_directory(path: Path) -> None:
    """Make a directory that only its owner can enter, or restrict an existing one. Raises `OSError`."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not stat.S_IMODE(path.stat().st_mode) & 0o077:
        return
    try:
        path.chmod(0o700)
    except PermissionError:  # another user's volume; new files in it are private all the same
        _log.warning(
            "other users of this machine can read %s, and this process may not change that, because another user owns "
            "the directory; run chmod 700 on it as its owner",
            path,
        )


def write_private(path: Path, text: str) -> None:
    """Write a small file that only its owner can read, whole or not at all."""
    with _private_draft(path, text) as draft:
        draft.replace(path)
    sync_file(path.parent)


def write_private_once(path: Path, text: str) -> None:
    """`write_private`, unless the file exists. Of several processes, only one writes it."""
    with _private_draft(path, text) as draft, suppress(FileExistsError):
        path.hardlink_to(draft)
    sync_file(path.parent)


@contextmanager
def _private_draft(path: Path, text: str) -> Generator[Path]:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


class Scratch:
    """A directory of scratch files. Each has a subdirectory, which its process locks for as long as it lives.

    So a sweep, by this process or another one over the same directory, removes only what a crash left.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self) -> None:
        """Make the directory, and remove what a crash left in it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._directory.iterdir():
            with suppress(FileNotFoundError, BlockingIOError), _locked(left):
                _remove(left)

    @contextmanager
    def path(self) -> Generator[Path]:
        """A path for a new file, which is removed at the end of the block unless it was moved away."""
        with ExitStack() as lock:
            place = self._place(lock)
            try:
                yield place / _SCRATCH_NAME
            finally:
                shutil.rmtree(place, ignore_errors=True)

    def _place(self, lock: ExitStack) -> Path:
        """A new directory, locked by `lock`. If another process's sweep removes it first, try again."""
        while True:
            place = self._directory / secrets.token_hex(16)
            place.mkdir(mode=0o700)
            with suppress(FileNotFoundError, BlockingIOError), ExitStack() as mine:
                mine.enter_context(_locked(place))
                place.stat()
                lock.push(mine.pop_all())
                return place


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Lock a file or directory for the length of the block. Raises `BlockingIOError` if it is locked already."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
