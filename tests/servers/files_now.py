"""The files of a folder in which others write and delete while a test looks."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG


def files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each regular file and its state, in the order of the paths. What is deleted meanwhile is left out."""
    found = sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names)
    for path in found:
        with suppress(FileNotFoundError):
            if S_ISREG((state := path.stat()).st_mode):
                yield path, state


def contents_of(folder: Path, since: float = 0.0) -> Iterator[tuple[Path, bytes]]:
    """Yield each file that was written to since then, and what it holds."""
    for path, state in files_in(folder):
        if state.st_mtime >= since:
            with suppress(FileNotFoundError):
                yield path, path.read_bytes()
