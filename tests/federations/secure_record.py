"""Everything that a coordinator received, sent, stored and logged of a secure round, as it was at any moment of it."""

import io
import logging
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers.files_now import contents_of
from tests.servers.postgres import dump
from umbel.aggregation.types import ClientId
from umbel.server.blobs.local import LocalBlobs
from umbel.server.store.replicas import RelayStore


@dataclass(frozen=True)
class Exchanged:
    """One request and its answer."""

    method: str
    path: str
    signed_by: str
    body: bytes
    status: int
    answer: bytes


@dataclass
class Record:
    """`stored`: every blob as it was put, and the database's files and rows after each step. `log`: at DEBUG.

    `data`: where all of it lies, but for the rows of a PostgreSQL, at `database_url`.
    """

    data: Path
    database_url: str | None = None
    exchanged: list[Exchanged] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    log: io.StringIO = field(default_factory=io.StringIO)

    def look(self, when: str) -> None:
        """Keep what is stored now."""
        for path, data in contents_of(self.data):
            self.stored[f"{when}: {path.relative_to(self.data)}"] = data
        self.stored[f"{when}: rows"] = self._rows()

    def _rows(self) -> bytes:
        if self.database_url is not None:
            return dump(self.database_url)
        with sqlite3.connect(f"file:{self.data / 'umbel.db'}?mode=ro", uri=True) as connection:
            rows = "\n".join(connection.iterdump()).encode()
        connection.close()
        return rows

    @property
    def kept(self) -> dict[str, bytes]:
        """All that was written, by where."""
        blobs = {f"blob {key}": data for key, data in self.blobs.items()}
        return {**self.stored, **blobs, "log": self.log.getvalue().encode()}

    def sent_by(self, client: str, method: str, ending: str) -> list[Exchanged]:
        return [
            one
            for one in self.exchanged
            if (one.method, one.signed_by) == (method, client) and one.path.endswith(ending) and one.status < 300
        ]

    def transport(self, inner: Any) -> "_Transport":
        return _Transport(inner, self)


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, inner: Any, record: Record) -> None:
        self._inner, self._record = inner, record

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        response = await self._inner.handle_async_request(request)
        answer = await response.aread()
        _, _, rest = request.headers.get("signature-input", "").partition('keyid="')
        who = rest.partition('"')[0]
        self._record.exchanged.append(
            Exchanged(request.method, request.url.path, who, body, response.status_code, answer)
        )
        return httpx.Response(response.status_code, headers=response.headers, content=answer)


@contextmanager
def recorded(patch: pytest.MonkeyPatch, data: Path, database_url: str | None = None) -> Generator[Record]:
    """Every blob and every line of the log from now on, and what replicas hand one another."""
    record = Record(data, database_url)
    put, relay = LocalBlobs.put, RelayStore.put

    def keep(self: LocalBlobs, path: Path, key: str) -> None:
        record.blobs[f"{len(record.blobs)} {key}"] = path.read_bytes()
        put(self, path, key)

    async def keep_relayed(self: RelayStore, round_id: int, key: bytes, sealed: Mapping[ClientId, bytes]) -> bool:
        is_put = await relay(self, round_id, key, sealed)
        record.look(f"handed over {', '.join(sealed)}")
        return is_put

    patch.setattr(LocalBlobs, "put", keep)
    patch.setattr(RelayStore, "put", keep_relayed)
    handler, root = logging.StreamHandler(record.log), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield record
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
