"""Download a model, or a change of one: streamed to disk, resumed after a cut, and checked by its SHA-256.

The coordinator may answer with a link (`redirect.py`). If the link brings nothing, or another file, the client asks the
coordinator for the file itself, and for some time for all other files too. After a cut it asks for a new link, because
the old one may have expired. The time of these requests does not reveal what went wrong.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from umbel.client.errors import CoordinatorMisbehaved, LinkFailed, Redirected
from umbel.client.files import file_sha256, write_all
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.redirect import Links
from umbel.client.wire.transport import Patience, patiently

log = logging.getLogger("umbel.client")


class WantedFile(Protocol):
    """A file to download: its hash and its length."""

    @property
    def sha256(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Downloaded:
    """The missing bytes that came, and the seconds they took, without deliberate waits."""

    n_bytes: int
    seconds: float


def download(
    coordinator: CoordinatorClient, model: WantedFile, part: Path, patience: Patience, links: Links
) -> Downloaded:
    """Download the file to `part`, which may hold some of it already.

    Raises `CoordinatorMisbehaved` for a wrong digest, or too many bytes.
    """
    have, started = _size(part), links.clock()
    source = _DownloadSource(links, patience, is_direct=not links.may_follow)
    while True:
        patiently(lambda: _fetch_rest(coordinator, model, part, source), patience)
        if file_sha256(part) == model.sha256:
            return Downloaded(model.size_bytes - have, links.clock() - started - source.waited_s)
        part.unlink()
        if source.taken_at is None:
            raise CoordinatorMisbehaved(f"the downloaded model does not have the SHA-256 {model.sha256[:12]}…")
        log.warning("a link of the coordinator led to another file; asking the coordinator itself")
        source.give_up()


@dataclass(slots=True)
class _DownloadSource:
    """Where to download from. `is_direct`: from the coordinator itself; `taken_at`: when the last link was followed."""

    links: Links
    patience: Patience
    is_direct: bool
    taken_at: float | None = None
    waited_s: float = 0.0

    def give_up(self) -> None:
        """Wait, then ask the coordinator itself from now on."""
        self.links.rest()
        self.wait_out()
        self.is_direct, self.taken_at = True, None

    def wait_out(self) -> None:
        """Wait until the coordinator may learn that a link has failed."""
        assert self.taken_at is not None, "only a failed link is waited out"
        began = self.links.clock()
        self.links.wait_out(self.taken_at, self.patience.timing, self.patience.wait)
        self.waited_s += self.links.clock() - began


def _fetch_rest(coordinator: CoordinatorClient, model: WantedFile, part: Path, source: _DownloadSource) -> None:
    """Append the missing bytes to `part`. After a cut they stay for the next try."""
    have = _size(part)
    if have > model.size_bytes:
        part.unlink()
        have = 0
    if have == model.size_bytes:
        return
    try:
        with coordinator.model(model.sha256, have, source.patience.until, source.is_direct) as response:
            _take(response, part, have, model.size_bytes)
    except Redirected as redirected:
        if source.is_direct:
            raise
        _follow(redirected, part, have, model.size_bytes, source)


def _follow(redirected: Redirected, part: Path, have: int, size_bytes: int, source: _DownloadSource) -> None:
    """Download the rest from a link. Raises `LinkFailed` at a time that reveals nothing to the coordinator."""
    source.taken_at = source.links.clock()
    try:
        with source.links.open(redirected, have, size_bytes, source.patience.until) as response:
            _take(response, part, have, size_bytes)
    except (LinkFailed, CoordinatorMisbehaved) as error:
        if _size(part) == have:
            source.give_up()
        else:
            source.wait_out()
        raise LinkFailed from error


def _take(response: httpx.Response, part: Path, have: int, size_bytes: int) -> None:
    """Append the body, or replace the file if the body is the whole file."""
    start = have if response.status_code == 206 else 0
    with part.open("r+b" if start else "wb", buffering=0) as file:
        file.seek(start)
        _copy(response, file.fileno(), size_bytes - start)
    if _size(part) < size_bytes:
        raise CoordinatorMisbehaved(f"the downloaded model is shorter than {size_bytes} bytes")


def _copy(response: httpx.Response, fd: int, bytes_max: int) -> None:
    """Write every piece as it comes, so that a cut loses nothing in memory."""
    n_copied = 0
    for piece in response.iter_raw():
        n_copied += len(piece)
        if n_copied > bytes_max:
            raise CoordinatorMisbehaved("the downloaded model is longer than announced")
        write_all(fd, (piece,))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
