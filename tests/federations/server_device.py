"""A coordinator in memory and devices that speak docs/reference/wire.md to it: no `umbel.client` in here."""

import asyncio
import base64
import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import FastAPI
from pydantic import TypeAdapter
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import create_async_engine
from torch import Tensor

from tests.servers.migrated import copy_sqlite
from tests.servers.waits import until_told
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.trust.signatures import Target, content_digest, sign
from umbel.aggregation.types import RunId
from umbel.aggregation.update.wire import float32_header
from umbel.server.clock import Clock, SystemClock
from umbel.server.serve.app import create_app
from umbel.server.settings import Settings
from umbel.server.store import database
from umbel.server.store.replicas import OUTAGE_S, SIGN_S

Json = dict[str, Any]

_CODEC = TypeAdapter(CodecPlan)
_LONG_S = 15.0

_database_of: ContextVar[Callable[[Path], str | None]] = ContextVar("database_of", default=lambda _: None)

RUN_FILE = """
name = "demo"
seed = 7
[rounds]
count = {count}
target = {target}
minimum = {minimum}
over_selection = {over_selection}
window_s = {window_s}
[aggregation]
max_abs = 8.0
sample_count_max = 1000
"""


def run_file(
    count: int = 1, target: int = 3, minimum: int = 1, over_selection: float = 1.0, window_s: float = 600.0
) -> str:
    return RUN_FILE.format(
        count=count, target=target, minimum=minimum, over_selection=over_selection, window_s=window_s
    )


def small_state(seed: int = 0) -> dict[str, Tensor]:
    """A model with weights, a bfloat16 tensor, a BatchNorm counter and tied weights: ~40 values."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 4, generator=generator)
    return {
        "embed.weight": weight,
        "head.weight": weight,
        "half.weight": torch.randn(8, generator=generator).to(torch.bfloat16),
        "norm.running_mean": torch.randn(4, generator=generator),
        "norm.num_batches_tracked": torch.tensor(3),
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def repr_digest(data: bytes) -> str:
    return content_digest(hashlib.sha256(data).digest())


def update_of(layout: Layout, values: Tensor) -> bytes:
    """The bytes of an update that holds `values`."""
    return float32_header(layout).encode() + values.to(torch.float32).numpy().tobytes()


def update_for(assignment: Json, layout: Layout, values: Tensor) -> bytes:
    """The bytes of an update that holds `values`, as this assignment asks for them."""
    codec = codec_for(_CODEC.validate_python(assignment["codec"]), Grid(**assignment["grid"]), layout)
    return b"".join(codec.encode(lambda: iter([values.to(torch.float32)]), assignment["rank"]))


@dataclass
class Device:
    """One client of one run. `clock`: what it dates its signatures by."""

    http: httpx.AsyncClient
    name: str
    run: str = "demo"
    sample_count: int = 10
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    clock: Clock = field(default_factory=SystemClock)

    def headers(self, method: str, url: str, body: bytes, created: int | None = None, nonce: str = "") -> Json:
        """The signature's header fields, for a request as it should be."""
        path, _, query = url.partition("?")
        signed = sign(
            self.key,
            self.name,
            Target(method, path, query),
            hashlib.sha256(body).digest(),
            int(self.clock.now()) if created is None else created,
            nonce or secrets.token_urlsafe(16),
        )
        return {**signed.as_dict(), "Content-Type": "application/json"}

    async def send(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        merged = {**self.headers(method, url, body), **(headers or {})}
        return await self.http.request(method, url, content=body, headers=merged)

    async def enrol(self, token: str, labels: Mapping[str, str] | None = None) -> httpx.Response:
        raw = self.key.public_key().public_bytes_raw()
        body = {
            "token": token,
            "client": self.name,
            "public_key": base64.b64encode(raw).decode(),
            "labels": dict(labels or {}),
        }
        return await self.send("POST", "/v1/enrolments", json.dumps(body).encode())

    async def check_in(self, layout: Layout, wait_s: float = 10.0, **changed: object) -> httpx.Response:
        body = {
            "run": self.run,
            "sample_count": self.sample_count,
            "layout_digest": layout.model.digest,
            "wait_s": wait_s,
            **changed,
        }
        return await self.send("POST", "/v1/check-ins", json.dumps(body).encode())

    async def work(self, layout: Layout, wait_s: float = 10.0) -> Json:
        """Check in until there is work; the assignment."""

        async def offered() -> Json | None:
            answer = await self.check_in(layout, wait_s)
            assert answer.status_code == 200, answer.text
            return dict(answer.json()["assignment"] or {})

        return await until_told(f"work for {self.name}", offered)

    async def upload(self, assignment: str, update: bytes, **headers: str) -> httpx.Response:
        url = f"/v1/assignments/{assignment}/update"
        fields = {"Upload-Length": str(len(update)), "Upload-Complete": "?1", "Repr-Digest": repr_digest(update)}
        return await self.send("POST", url, update, {**fields, **headers})

    async def patch(
        self, assignment: str, chunk: bytes, offset: int, is_last: bool, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        fields = {
            "Content-Type": "application/partial-upload",
            "Upload-Offset": str(offset),
            "Upload-Complete": "?1" if is_last else "?0",
        }
        return await self.send("PATCH", f"/v1/assignments/{assignment}/update", chunk, {**fields, **(headers or {})})

    async def report(self, assignment: str, update: bytes, **changed: object) -> httpx.Response:
        body = {
            "sample_count": self.sample_count,
            "steps_done": 4,
            "steps_planned": 4,
            "update_sha256": sha256(update),
            **changed,
        }
        return await self.send("PUT", f"/v1/assignments/{assignment}/report", json.dumps(body).encode())

    async def take_part(self, layout: Layout, values: Tensor) -> Json:
        """A whole round: work, model, upload, report; the answer to the report."""
        assignment = await self.work(layout)
        model = await self.send("GET", f"/v1/models/{assignment['model']['sha256']}")
        assert sha256(model.content) == assignment["model"]["sha256"]
        update = update_for(assignment, layout, values)
        uploaded = await self.upload(assignment["id"], update)
        assert uploaded.status_code == 201, uploaded.text
        reported = await self.report(assignment["id"], update)
        assert reported.status_code == 200, reported.text
        return dict(reported.json())


@dataclass
class House:
    """A coordinator, its operator's connection, and its data directory."""

    http: httpx.AsyncClient
    settings: Settings
    app: Any

    @property
    def admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.settings.admin_key_path.read_text().strip()}"}

    @property
    def state(self) -> Any:
        return self.app.state.umbel

    @property
    def clock(self) -> Clock:
        """The coordinator's, where it is in this process."""
        clock: Clock = SystemClock() if self.app is None else self.state.services.clock
        return clock

    async def driver(self, run: str = "demo") -> Any:
        """The run's driver at this coordinator, which takes up the run if it has not seen it yet."""
        return await self.state.coordinator.driver(RunId(run))

    async def tokens(
        self, count: int = 1, ttl_s: float = 3600.0, client: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[str]:
        body = {"count": count, "ttl_s": ttl_s, "client": client, "labels": dict(labels or {})}
        answer = await self.http.post("/v1/admin/tokens", json=body, headers=self.admin)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tokens"])

    async def devices(self, count: int, **fields: Any) -> list[Device]:
        """Enrolled devices, named d0, d1, ..., with the coordinator's clock."""
        devices = [Device(self.http, f"d{i}", clock=self.clock, **fields) for i in range(count)]
        for device, token in zip(devices, await self.tokens(count), strict=True):
            answer = await device.enrol(token)
            assert answer.status_code == 200, answer.text
        return devices

    async def put_model(self, state: Mapping[str, Tensor], layout: Layout | None = None) -> str:
        data = encode_model(state, layout)
        answer = await self.http.put(f"/v1/admin/models/{sha256(data)}", content=data, headers=self.admin)
        assert answer.status_code == 200, answer.text
        return sha256(data)

    async def put_run(self, text: str, model: str, name: str = "demo") -> httpx.Response:
        headers = {**self.admin, "Content-Type": "application/toml"}
        return await self.http.put(f"/v1/admin/runs/{name}?model={model}", content=text, headers=headers)

    async def begin(self, text: str, state: Mapping[str, Tensor]) -> Layout:
        """Upload a model and create the run; the run's layout."""
        answer = await self.put_run(text, await self.put_model(state))
        assert answer.status_code == 201, answer.text
        return Layout.of_state(state)

    async def progress(self, after: int = 0, wait_s: float = 0.0, mark: str = "") -> Json:
        url = f"/v1/admin/runs/demo/progress?after={after}&wait_s={wait_s}&mark={mark}"
        answer = await self.http.get(url, headers=self.admin)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def ended(self, count: int) -> list[Json]:
        """The records of the first `count` ended attempts, once there are so many."""

        async def so_many() -> Json | None:
            progress = await self.progress(wait_s=10.0)
            if len(progress["ended"]) >= count:
                return progress
            await self.progress(after=len(progress["ended"]), wait_s=10.0)
            return None

        return list((await until_told(f"{count} ended attempts", so_many))["ended"][:count])

    async def nobody_waits(self) -> None:
        """That a client has left the waiting room is stored a little after its answer."""
        driver = await self.driver()

        async def is_empty() -> bool:
            return bool(await driver.waiting.count() == 0)

        await until_told("an empty waiting room", is_empty)

    async def model(self, digest: str) -> dict[str, Tensor]:
        answer = await self.http.get(f"/v1/admin/models/{digest}", headers=self.admin)
        assert answer.status_code == 200, answer.text
        return decode_model(answer.content)[1]


class LateClock:
    """A clock that stands, `late_s` after the time at which it was made: no deadline passes unless a test says so.

    The coordinator takes a jump for time in which it was not at work.
    """

    outage_s = OUTAGE_S

    def __init__(self) -> None:
        self.late_s = 0.0
        self._made_at = time.time()

    def now(self) -> float:
        return self._made_at + self.late_s

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        await SystemClock().wait(event, timeout_s)


class AttendedClock(LateClock):
    """A late clock whose jumps are no outages: the coordinator was at work all the time."""

    outage_s = float("inf")


class UntimedClock(SystemClock):
    """The machine's clock, by which no long wait ends: a request that is held open is answered when its bell rings."""

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        await super().wait(event, None if timeout_s is None or timeout_s >= _LONG_S else timeout_s)


async def pass_time(it: House, clock: LateClock, seconds: float) -> None:
    """Have time go by while the coordinator is at work: it signs often enough, and looks at what is due."""
    end = clock.late_s + seconds
    while clock.late_s < end:
        clock.late_s = min(clock.late_s + 2 * SIGN_S, end)
        await it.state.services.uptime.sign()
    for driver in it.state.coordinator.drivers.values():
        driver.wake()


@asynccontextmanager
async def house(data: Path, clock: Clock | None = None, **settings: Any) -> AsyncGenerator[House]:
    """A coordinator over `data`, spoken to without a socket."""
    given: Any = {"database_url": _database_of.get()(data), **settings}
    chosen = Settings(data=data, **given)
    if chosen.database_url is None:
        copy_sqlite(chosen.data / "umbel.db")
    # A machine that stood still for some seconds is no coordinator that was away: only a late clock has outages.
    app = create_app(chosen, clock, clock.outage_s if isinstance(clock, LateClock) else float("inf"))
    with pytest.MonkeyPatch.context() as patch:
        # A process that was stopped in a transaction is hung up on after 3 s; one of tests may only have been held up.
        patch.setitem(database._POSTGRESQL_SETTINGS, "idle_in_transaction_session_timeout", "600s")  # pyright: ignore[reportPrivateUsage]
        async with _running(app, chosen) as it:
            yield it


@asynccontextmanager
async def _running(app: FastAPI, chosen: Settings) -> AsyncGenerator[House]:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://umbel", timeout=30.0) as http:
            yield House(http, chosen, app)


@contextmanager
def houses_over(database_of: Callable[[Path], str | None]) -> Generator[None]:
    """Every `house` takes the database that this names for its directory; None: SQLite, in the directory."""
    token = _database_of.set(database_of)
    try:
        yield
    finally:
        _database_of.reset(token)


def rows(settings: Settings) -> dict[str, list[tuple[object, ...]]]:
    """Every row that a refused request must leave as it was: all but nonces, when a client was last heard of, and notes
    of refusals."""
    if settings.database_url is not None:
        with ThreadPoolExecutor(1) as thread:  # the caller's event loop may be running
            return thread.submit(asyncio.run, _postgresql_rows(settings.database_url)).result()
    with sqlite3.connect(f"file:{settings.data / 'umbel.db'}?mode=ro", uri=True) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {name: connection.execute(query).fetchall() for name, query in _queries(names).items()}
    connection.close()
    return found


async def _postgresql_rows(url: str) -> dict[str, list[tuple[object, ...]]]:
    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.connect() as connection:
        names = await connection.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"))
        queries = _queries(sorted(names))
        return {name: sorted(map(tuple, await connection.execute(text(queries[name]))), key=repr) for name in queries}


def _queries(names: Iterable[str]) -> dict[str, str]:
    changing = ("nonces", "waiters", "turned_away", "replicas", "signs_of_life")
    queries = {name: f"SELECT * FROM {name}" for name in names if name not in changing}
    return {**queries, "clients": "SELECT id, public_key, labels, bound_labels, revoked_at FROM clients"}


def stored_update(settings: Settings, assignment: str) -> list[Path]:
    """The files that an assignment's update consists of, in order."""
    chunks = (settings.data / "blobs" / "updates" / assignment).glob("*")
    return sorted(chunks, key=lambda path: int(path.name.partition("-")[0]))


def stored_updates(settings: Settings) -> list[Path]:
    """The files of all updates."""
    walked = os.walk(settings.data / "blobs" / "updates")  # which folders may vanish from meanwhile
    return [Path(folder) / name for folder, _, names in walked for name in names]


def problem(response: httpx.Response) -> str:
    """The kind of a problem document, which must be a whole one."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    body = response.json()
    assert body["status"] == response.status_code
    assert body["title"]
    assert body["detail"]
    return str(body["type"]).removeprefix("urn:umbel:problem:")
