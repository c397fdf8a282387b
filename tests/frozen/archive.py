"""`stored.tar.zst`: directories as a coordinator and clients have left them, with the modes that their files had."""

import io
import sqlite3
import tarfile
from collections.abc import Iterable
from pathlib import Path

import zstandard

from tests.frozen.kept import FOLDER

ARCHIVE = FOLDER / "stored.tar.zst"
_LEVEL = 19
_LEFT_OUT = ("lock", "endpoint")


def unpacked(folder: Path) -> Path:
    """All of it, in `folder`."""
    data = zstandard.ZstdDecompressor().stream_reader(ARCHIVE.read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter=_with_its_mode)
    return folder


def _with_its_mode(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """As the filter for data has it, but for the bits of the owner's, the group's and others' rights."""
    safe = tarfile.data_filter(member, folder)
    return safe.replace(mode=member.mode & 0o777, deep=False)


def pack(folder: Path) -> None:
    """Write the archive anew: the same files make the same bytes."""
    for path in folder.rglob("*.db"):
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("VACUUM")
        connection.close()
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as tar:
        for path in _kept(folder):
            info = tar.gettarinfo(path, str(path.relative_to(folder)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with path.open("rb") if path.is_file() else io.BytesIO() as file:
                tar.addfile(info, file if path.is_file() else None)
    ARCHIVE.write_bytes(zstandard.ZstdCompressor(level=_LEVEL).compress(body.getvalue()))


def _kept(folder: Path) -> Iterable[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.name not in _LEFT_OUT]
