"""Blobs in a local directory: a key is a path in it.

A file appears under its key only when it is whole and on disk: written elsewhere, synced, renamed, directory synced.
"""

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO, RawIOBase
from pathlib import Path

from umbel.aggregation.types import SHA256
from umbel.server.blobs.blobs import UnknownBlob, model_key, require_key
from umbel.server.blobs.files import Scratch, private_directory, sync_file

_MAKING = "making"


class LocalBlobs:
    """A directory of blobs and scratch files. Several processes may share it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._scratch = Scratch(directory / _MAKING)

    def prepare(self) -> None:
        private_directory(self._directory)
        self._scratch.prepare()
        self._take_in_models()
        with self.scratch():
            pass  # fail now, not in mid-round, if the directory cannot be written

    def put(self, path: Path, key: str) -> None:
        target = self._path(key)
        path.chmod(0o600)
        sync_file(path)
        while True:
            self._make_parents(target)
            try:
                path.replace(target)
                sync_file(target.parent)
            except FileNotFoundError:
                path.stat()  # raises if the file itself is missing; else `delete` removed the empty directory
                continue
            return

    @contextmanager
    def open(self, key: str, offset: int = 0, length: int | None = None) -> Generator[RawIOBase]:
        try:
            file = FileIO(self._path(key))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise UnknownBlob(key) from error
        with file:
            file.seek(offset)
            yield file if length is None else _Span(file, length)

    def size(self, key: str) -> int | None:
        path = self._path(key)
        return path.stat().st_size if path.is_file() else None

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or removed by another process
                for parent in list(path.relative_to(self._directory).parents)[:-2]:
                    (self._directory / parent).rmdir()

    def keys(self, prefix: str) -> Iterator[str]:
        require_key(prefix)
        for path, _, names in os.walk(self._directory / prefix):
            for name in names:
                yield (Path(path) / name).relative_to(self._directory).as_posix()

    @contextmanager
    def local(self, key: str) -> Generator[Path]:
        path = self._path(key)
        if not path.is_file():
            raise UnknownBlob(key)
        yield path

    def link(self, key: str, expires_s: float) -> str | None:
        return None

    def scratch(self) -> AbstractContextManager[Path]:
        return self._scratch.path()

    def _path(self, key: str) -> Path:
        require_key(key)
        if key.split("/")[0] == _MAKING:
            raise ValueError(f"not a blob's key: {key!r}; the coordinator keeps temporary files under this name")
        return self._directory / key

    def _make_parents(self, target: Path) -> None:
        """Make a blob's directory, durably."""
        for parent in reversed(target.relative_to(self._directory).parents):
            directory = self._directory / parent
            if not directory.is_dir():
                directory.mkdir(mode=0o700, exist_ok=True)
                sync_file(directory.parent)

    def _take_in_models(self) -> None:
        """Move models from where they were before version 0.1: at the top, under their hash alone."""
        for path in self._directory.iterdir():
            if SHA256.fullmatch(path.name):
                self.put(path, model_key(path.name))


class _Span(RawIOBase):
    """At most `n_bytes` of a file, from its current position. The caller closes the file."""

    def __init__(self, file: FileIO, n_bytes: int) -> None:
        self._file = file
        self._left = n_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview", /) -> int:  # type: ignore[override]  # what we hand in
        n_read = self._file.readinto(memoryview(buffer)[: self._left])
        self._left -= n_read
        return n_read
