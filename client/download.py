"""Fetch a model, or a change of one: streamed to disk, resumed after a cut, believed only when its SHA-256 is right.

The coordinator may send us elsewhere for it (`elsewhere.py`). A link that brings nothing, or something else, is not
tried again: then the coordinator is asked to send the file itself. After a cut it is asked for a new link, for the old
one may have expired.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from umbel.client.coordinator import Coordinator
from umbel.client.elsewhere import elsewhere
from umbel.client.errors import CoordinatorMisbehaved, Redirected
from umbel.client.files import file_sha256, write_all
from umbel.client.transport import Patience, patiently

log = logging.getLogger("umbel.client")


class Named(Protocol):
    """What is wanted: its hash and its length."""

    @property
    def sha256(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...


def download(coordinator: Coordinator, model: Named, part: Path, patience: Patience) -> int:
    """Have the file at `part`, of which there may be some already; how many bytes of it were missing.

    Raises `CoordinatorMisbehaved` for bytes that do not hash to its name, or that are too many.
    """
    have = _size(part)
    until = math.inf if patience.until is None else patience.until
    way = _Way()
    while True:
        patiently(lambda: _fetch_rest(coordinator, model, part, until, way), patience)
        if file_sha256(part) == model.sha256:
            return model.size_bytes - have
        part.unlink()
        if not way.was_elsewhere:
            raise CoordinatorMisbehaved(f"the model that came does not have the SHA-256 {model.sha256[:12]}… it should")
        log.warning("what a link of the coordinator's led to is not the model; asking the coordinator itself")
        way.is_direct, way.was_elsewhere = True, False


@dataclass(slots=True)
class _Way:
    """How to ask: `is_direct`, from the coordinator itself. `was_elsewhere`: a link was followed."""

    is_direct: bool = False
    was_elsewhere: bool = False


def _fetch_rest(coordinator: Coordinator, model: Named, part: Path, until: float, way: _Way) -> None:
    """Append what is missing of `part`. A cut leaves what came for the next try."""
    have = _size(part)
    if have > model.size_bytes:
        part.unlink()
        have = 0
    if have == model.size_bytes:
        return
    try:
        with coordinator.model(model.sha256, have, until, way.is_direct) as response:
            _take(response, part, have, model.size_bytes)
    except Redirected as redirected:
        if way.is_direct:
            raise
        _follow(redirected, part, have, model.size_bytes, until, way)


def _follow(redirected: Redirected, part: Path, have: int, size_bytes: int, until: float, way: _Way) -> None:
    way.was_elsewhere = True
    try:
        with elsewhere(redirected, have, size_bytes, until) as response:
            _take(response, part, have, size_bytes)
    finally:
        way.is_direct = _size(part) == have


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
