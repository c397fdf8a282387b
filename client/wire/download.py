"""Fetch a model, or a change of one: streamed to disk, resumed after a cut, believed only when its SHA-256 is right.

The coordinator may send us elsewhere for it (`elsewhere.py`). A link that brings nothing, or something else, is not
tried again: then the coordinator is asked to send the file itself, and for some time all other files too. After a cut
it is asked for a new link, for the old one may have expired. When it is asked does not tell what went wrong.
"""

import logging
import math
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
    """What is wanted: its hash and its length."""

    @property
    def sha256(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Downloaded:
    """`n_bytes`: how many were missing; `seconds`: how long they took, without what was waited for the clock alone."""

    n_bytes: int
    seconds: float


def download(
    coordinator: CoordinatorClient, model: WantedFile, part: Path, patience: Patience, links: Links
) -> Downloaded:
    """Have the file at `part`, of which there may be some already.

    Raises `CoordinatorMisbehaved` for bytes that do not hash to its name, or that are too many.
    """
    have, started = _size(part), links.clock()
    way = _Way(links, patience, is_direct=not links.may_follow)
    while True:
        patiently(lambda: _fetch_rest(coordinator, model, part, way), patience)
        if file_sha256(part) == model.sha256:
            return Downloaded(model.size_bytes - have, links.clock() - started - way.waited_s)
        part.unlink()
        if not way.was_elsewhere:
            raise CoordinatorMisbehaved(f"the model that came does not have the SHA-256 {model.sha256[:12]}… it should")
        log.warning("what a link of the coordinator's led to is not the model; asking the coordinator itself")
        way.give_up()


@dataclass(slots=True)
class _Way:
    """How to ask: `is_direct`, from the coordinator itself. `taken_at`: when the last link was, if one was followed."""

    links: Links
    patience: Patience
    is_direct: bool
    taken_at: float | None = None
    waited_s: float = 0.0

    @property
    def until(self) -> float:
        return math.inf if self.patience.until is None else self.patience.until

    @property
    def was_elsewhere(self) -> bool:
        return self.taken_at is not None

    def take_link(self) -> None:
        self.taken_at = self.links.clock()

    def give_up(self) -> None:
        """Ask the coordinator itself from now on, but not before it is time to."""
        self.links.rest()
        self.wait_out()
        self.is_direct, self.taken_at = True, None

    def wait_out(self) -> None:
        """Wait until the coordinator may see that a link has failed."""
        assert self.taken_at is not None, "only a link is waited out"
        began = self.links.clock()
        self.links.wait_out(self.taken_at, self.patience.timing, self.patience.wait)
        self.waited_s += self.links.clock() - began


def _fetch_rest(coordinator: CoordinatorClient, model: WantedFile, part: Path, way: _Way) -> None:
    """Append what is missing of `part`. A cut leaves what came for the next try."""
    have = _size(part)
    if have > model.size_bytes:
        part.unlink()
        have = 0
    if have == model.size_bytes:
        return
    try:
        with coordinator.model(model.sha256, have, way.until, way.is_direct) as response:
            _take(response, part, have, model.size_bytes)
    except Redirected as redirected:
        if way.is_direct:
            raise
        _follow(redirected, part, have, model.size_bytes, way)


def _follow(redirected: Redirected, part: Path, have: int, size_bytes: int, way: _Way) -> None:
    """Take the rest from a link. Raises `LinkFailed` at a time when the coordinator may see that not all came."""
    way.take_link()
    try:
        with way.links.open(redirected, have, size_bytes, way.until) as response:
            _take(response, part, have, size_bytes)
    except (LinkFailed, CoordinatorMisbehaved) as error:
        if _size(part) == have:
            way.give_up()
        else:
            way.wait_out()
        raise LinkFailed from error


def _take(response: httpx.Response, part: Path, have: int, size_bytes: int) -> None:
    """Write what comes behind what is there, or in its place if it is the whole file."""
    start = have if response.status_code == 206 else 0
    with part.open("r+b" if start else "wb", buffering=0) as file:
        file.seek(start)
        _copy(response, file.fileno(), size_bytes - start)
    if _size(part) < size_bytes:
        raise CoordinatorMisbehaved(f"the model that came is shorter than its {size_bytes} bytes")


def _copy(response: httpx.Response, fd: int, bytes_max: int) -> None:
    """Write every piece as it comes: what is held back in memory would be lost in a cut."""
    n_copied = 0
    for piece in response.iter_raw():
        n_copied += len(piece)
        if n_copied > bytes_max:
            raise CoordinatorMisbehaved("the model that came is longer than announced")
        write_all(fd, (piece,))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
