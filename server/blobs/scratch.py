"""Files in the making: a directory for each, held by a lock for as long as its maker lives.

So a sweep, by this process or another one over the same directory, takes what a crash left and nothing else.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_NAME = "file"


class Scratch:
    """A directory of files in the making."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self) -> None:
        """Make the directory, and drop what a crash left in it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._directory.iterdir():
            with suppress(FileNotFoundError, BlockingIOError), _held(left):
                _remove(left)

    @contextmanager
    def path(self) -> Generator[Path]:
        """A path to write a new file to, dropped at the end of the block unless it was moved away."""
        with ExitStack() as lock:
            place = self._place(lock)
            try:
                yield place / _NAME
            finally:
                shutil.rmtree(place, ignore_errors=True)

    def _place(self, lock: ExitStack) -> Path:
        """A new directory, and `lock` holds it. The sweep of another process may take it first: then another one."""
        while True:
            place = self._directory / secrets.token_hex(16)
            place.mkdir(mode=0o700)
            with suppress(FileNotFoundError, BlockingIOError), ExitStack() as mine:
                mine.enter_context(_held(place))
                place.stat()
                lock.push(mine.pop_all())
                return place


@contextmanager
def _held(path: Path) -> Generator[None]:
    """Hold a file or directory by its lock, which goes with the process. Raises `BlockingIOError` if another has it."""
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
