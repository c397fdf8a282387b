"""Have the files of a data set in a folder: as they lie there, or fetched from their official source.

A file is written beside its place and moved there once it is whole and its SHA-256 right, so that what is under its
name is never a part of it. Files that are there already are not judged here: their readers do that.
"""

import hashlib
import io
import logging
import os
import tempfile
import zipfile
import zlib
from pathlib import Path

import httpx

from umbel.sim.data.data_set import DataError
from umbel.sim.data.sets.sources import Archive, RemoteFile, Source

log = logging.getLogger("umbel.sim")

_TIMEOUT_S = 30.0
_AS_IT_IS = {"Accept-Encoding": "identity"}


class _NotFetched(Exception):
    """Why a file did not come, in words that follow its address."""


def have(source: Source, folder: Path | None) -> Path:
    """The folder in which all files of `source` are; what is not there yet is fetched into it.

    `folder`: that of all data sets, which may not exist yet. Raises `DataError` that says which files to put where if
    they cannot be fetched, and `OSError` if they cannot be written.
    """
    if folder is None:
        raise DataError(
            f"{source.title} is read from files: name their folder: data=DIR, or on the command line --data DIR"
        )
    place = folder / source.folder
    missing = [file for file in source.files if not (place / file.name).exists()]
    if not missing:
        return place
    if source.address is None:
        raise DataError(f"{_by_hand(missing, place)}; no source offers {source.title} in this form for good")
    place.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(source, source.address, missing, place)
    except _NotFetched as error:
        raise DataError(f"{error}. Try again, or: {_by_hand(missing, place)}") from error
    return place


def _by_hand(missing: list[RemoteFile], place: Path) -> str:
    named = ", ".join(f"{file.name} ({file.n_bytes} bytes, sha256 {file.sha256})" for file in missing)
    return f"put into {place}: {named}"


def _fetch(source: Source, address: str, missing: list[RemoteFile], place: Path) -> None:
    with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True, headers=_AS_IT_IS) as http:
        if source.archive is not None:
            packed = _bytes_of(http, address + source.archive.name, source.archive.bytes_max)
            for file in missing:
                _keep(_unpacked(packed, source.archive, file), file, address + source.archive.name, place)
            return
        for file in missing:
            log.info("fetching %s (%.1f MB) for %s", address + file.name, file.n_bytes / 1e6, source.title)
            _keep(_bytes_of(http, address + file.name, file.n_bytes), file, address + file.name, place)


def _bytes_of(http: httpx.Client, url: str, bytes_max: int) -> bytes:
    """What lies at `url`, no more of it held than `bytes_max`."""
    data = bytearray()
    try:
        with http.stream("GET", url) as answer:
            if not answer.is_success:
                raise _NotFetched(f"{url} answers {answer.status_code}")
            for piece in answer.iter_raw():
                if len(data) + len(piece) > bytes_max:
                    raise _NotFetched(f"{url} is longer than {bytes_max} bytes")
                data += piece
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _NotFetched(f"{url} cannot be fetched: {str(error) or type(error).__name__}") from error
    return bytes(data)


def _unpacked(packed: bytes, archive: Archive, file: RemoteFile) -> bytes:
    """One file of an archive, no more of it than it may be long."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as opened:
            name = next((name for name in opened.namelist() if Path(name).name == file.name), None)
            if name is None:
                raise _NotFetched(f"{archive.name} holds no {file.name}")
            with opened.open(name) as member:
                return member.read(file.n_bytes + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _NotFetched(f"{archive.name} is no ZIP file that can be read: {error}") from error


def _keep(data: bytes, file: RemoteFile, url: str, place: Path) -> None:
    if len(data) != file.n_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise _NotFetched(f"{url} is not the {file.name} that is known: its SHA-256 differs")
    descriptor, part = tempfile.mkstemp(prefix=f".{file.name}.", dir=place)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        os.chmod(part, 0o644)  # as any file of data; mkstemp's own is for one user alone
        os.replace(part, place / file.name)
    except BaseException:
        os.unlink(part)
        raise
