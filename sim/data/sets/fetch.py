"""The files of data sets: their official addresses, and how a missing file is fetched into a folder.

A file is written beside its place and moved there once it is complete and its SHA-256 matches, so a file under its
final name is always complete. Existing files are checked by their readers.
"""

import hashlib
import io
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx

from umbel.sim.data.data_set import DataError

_ARCHIVE_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file's name, and the only bytes that it may hold."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Archive:
    """A ZIP file at a source that holds the files. Only its contents are checked, because it may be repacked."""

    name: str
    bytes_max: int = _ARCHIVE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class DataSource:
    """The files of one data set."""

    title: str
    folder: str  # within the data folder
    address: str | None  # from where they are fetched, ending in a slash; None without a permanent source
    files: tuple[RemoteFile, ...]
    archive: Archive | None = None  # that contains the files there


MNIST = DataSource(
    "MNIST",
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
    ),
)

FASHION_MNIST = DataSource(
    "Fashion-MNIST",
    "fashion_mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # the only one its authors name; digests guard it
    (
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
    ),
)

HEART_DISEASE = DataSource(
    "UCI Heart Disease",
    "heart_disease",
    "https://archive.ics.uci.edu/static/public/45/",
    (
        RemoteFile(
            "processed.cleveland.data", 18_461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"
        ),
        RemoteFile(
            "processed.hungarian.data", 10_263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"
        ),
        RemoteFile(
            "processed.switzerland.data", 4_109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"
        ),
        RemoteFile("processed.va.data", 6_737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
    ),
    Archive("heart+disease.zip"),
)

SHAKESPEARE = DataSource(
    "Shakespeare's plays",
    "shakespeare",
    None,
    (
        RemoteFile(
            "shakespeare_lines.tsv.gz", 2_695_953, "504e54195719aa24cb46b983efb535a63b406b1e1440d592a18ef91137dfb000"
        ),
    ),
)

SOURCES: Mapping[str, DataSource] = MappingProxyType(
    {"mnist": MNIST, "fashion-mnist": FASHION_MNIST, "heart-disease": HEART_DISEASE, "shakespeare": SHAKESPEARE}
)


log = logging.getLogger("umbel.sim")

_TIMEOUT_S = 30.0
_AS_IT_IS = {"Accept-Encoding": "identity"}


class _NotFetched(Exception):
    """Why a file could not be fetched."""


def have(source: DataSource, folder: Path | None) -> Path:
    """The folder of `source`'s files, after missing ones are fetched into it.

    `folder`: of all data sets; it may not exist yet. Raises `DataError`, which says where to put files that cannot be
    fetched, and `OSError`.
    """
    if folder is None:
        raise DataError(
            f"{source.title} is read from files, and no folder for them is set: pass data=DIR, or --data DIR on the "
            "command line"
        )
    place = folder / source.folder
    missing = [file for file in source.files if not (place / file.name).exists()]
    if not missing:
        return place
    if source.address is None:
        raise DataError(
            f"{source.title} cannot be fetched, because no source offers it permanently in this form: "
            f"{_by_hand(missing, place)}"
        )
    place.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(source, source.address, missing, place)
    except _NotFetched as error:
        raise DataError(f"{error}. Try again, or {_by_hand(missing, place)}") from error
    return place


def _by_hand(missing: list[RemoteFile], place: Path) -> str:
    named = ", ".join(f"{file.name} ({file.n_bytes} bytes, sha256 {file.sha256})" for file in missing)
    return f"put into {place}: {named}"


def _fetch(source: DataSource, address: str, missing: list[RemoteFile], place: Path) -> None:
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
    """The content of `url`, of which at most `bytes_max` are held."""
    data = bytearray()
    try:
        with http.stream("GET", url) as answer:
            if not answer.is_success:
                raise _NotFetched(f"{url} answers with HTTP status {answer.status_code}")
            for piece in answer.iter_raw():
                if len(data) + len(piece) > bytes_max:
                    raise _NotFetched(f"{url} is longer than {bytes_max} bytes")
                data += piece
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _NotFetched(f"{url} cannot be fetched: {str(error) or type(error).__name__}") from error
    return bytes(data)


def _unpacked(packed: bytes, archive: Archive, file: RemoteFile) -> bytes:
    """One file of an archive, read no further than its known length."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as opened:
            name = next((name for name in opened.namelist() if Path(name).name == file.name), None)
            if name is None:
                raise _NotFetched(f"{archive.name} does not contain {file.name}")
            with opened.open(name) as member:
                return member.read(file.n_bytes + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _NotFetched(f"{archive.name} cannot be read as a ZIP file: {error}") from error


def _keep(data: bytes, file: RemoteFile, url: str, place: Path) -> None:
    if len(data) != file.n_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
        raise _NotFetched(f"{url} is not the expected {file.name}: its length or SHA-256 differs")
    descriptor, part = tempfile.mkstemp(prefix=f".{file.name}.", dir=place)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        os.chmod(part, 0o644)  # as any file of data; mkstemp's own is for one user alone
        os.replace(part, place / file.name)
    except BaseException:
        os.unlink(part)
        raise
