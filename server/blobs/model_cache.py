"""Local copies of a bucket's models. Each process verifies a copy once; the least recently used are dropped first."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from umbel.aggregation.types import SHA256
from umbel.server.blobs.files import file_sha256


class ModelCache:
    """A directory of files named by their SHA-256, of at most `bytes_max` in total besides those in use.

    Threads may share it. A file that is missing or damaged is fetched again.
    """

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._directory = directory
        self._bytes_max = bytes_max
        self._books = threading.Lock()
        self._held: Counter[str] = Counter()
        self._verified: set[str] = set()
        self._fetching: WeakValueDictionary[str, _Turn] = WeakValueDictionary()

    def prepare(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room()

    @contextmanager
    def hold(self, sha256: str, fetch: Callable[[], None]) -> Generator[Path]:
        """The file, which stays for the length of the block. If it is missing, `fetch` must `add` it."""
        path = self._directory / sha256
        with self._books:
            self._held[sha256] += 1
            turn = self._fetching.setdefault(sha256, _Turn())
        try:
            with turn.lock:
                if not self._is_here(path):
                    fetch()
            os.utime(path)
            yield path
        finally:
            with self._books:
                self._held[sha256] -= 1
            self._make_room()

    def add(self, path: Path, sha256: str) -> None:
        """Move a file in. The caller has checked its hash."""
        path.replace(self._directory / sha256)
        self._verified.add(sha256)
        self._make_room()

    def drop(self, sha256: str) -> None:
        """Remove a file if it is here. Readers that have it open can read on."""
        self._verified.discard(sha256)
        (self._directory / sha256).unlink(missing_ok=True)

    def _is_here(self, path: Path) -> bool:
        """Whether a good copy is here. A copy of an earlier process may be damaged, because it was not synced."""
        if not path.is_file():
            return False
        if path.name not in self._verified and file_sha256(path) != path.name:
            path.unlink()
            return False
        self._verified.add(path.name)
        return True

    def _make_room(self) -> None:
        with self._books:
            files = [entry for entry in os.scandir(self._directory) if SHA256.fullmatch(entry.name)]
            files.sort(key=lambda entry: entry.stat().st_mtime)
            excess = sum(entry.stat().st_size for entry in files) - self._bytes_max
            for entry in files:
                if excess <= 0:
                    return
                if not self._held[entry.name]:
                    excess -= entry.stat().st_size
                    self.drop(entry.name)


class _Turn:
    """A lock for fetching one file."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
