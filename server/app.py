"""The coordinator as an ASGI application: `create_app(settings, clock)`. Nothing happens at import time."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from fastapi import FastAPI

from umbel.server import journal, problems, routes_admin, routes_devices, routes_models, routes_uploads
from umbel.server.auth import AdminKey
from umbel.server.blobs import open_blobs
from umbel.server.clock import Clock, SystemClock
from umbel.server.database import Database
from umbel.server.http import State
from umbel.server.limits import BodyLimits, caps_of
from umbel.server.registry import Registry
from umbel.server.services import Services
from umbel.server.settings import Settings
from umbel.server.store import Store
from umbel.server.waiting import Heard

_log = logging.getLogger(__name__)
_NONCE_SWEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class Health:
    """GET /v1/health."""

    status: str = "ok"


def create_app(settings: Settings, clock: Clock | None = None) -> FastAPI:
    """A coordinator over the data directory of `settings`. Only one at a time may work on a directory."""
    clock = clock or SystemClock()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with running(settings, clock) as state:
            app.state.umbel = state
            yield

    app = FastAPI(
        title="umbel coordinator",
        version="1",
        openapi_url="/v1/openapi.json",
        docs_url=None,  # the pages would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to whatever Host the request names
        lifespan=lifespan,
    )
    for routes in (routes_devices, routes_models, routes_uploads, routes_admin):
        app.include_router(routes.router)
    app.add_api_route("/v1/health", _health, tags=["health"])
    app.add_middleware(BodyLimits, caps=caps_of(settings))
    problems.install(app)
    return app


@asynccontextmanager
async def running(settings: Settings, clock: Clock) -> AsyncGenerator[State]:
    """Everything a coordinator consists of, from its first transaction to its last."""
    settings.data.mkdir(parents=True, exist_ok=True)
    database, worker = Database(settings.database), ThreadPoolExecutor(1, "umbel-worker")
    blobs = open_blobs(settings)
    services = Services(settings, clock, Registry(database), Store(database), blobs, Heard(clock), worker)
    try:
        await database.migrate()
        blobs.prepare()
        services.uploads.mkdir(exist_ok=True)
        state = State(services, AdminKey.load(settings.admin_key_path))
        await state.coordinator.start()
        journal.started(settings.data, len(state.coordinator.drivers))
        sweep = asyncio.create_task(_sweep_nonces(services))
        try:
            yield state
        finally:
            sweep.cancel()
            with suppress(asyncio.CancelledError):
                await sweep
            await state.coordinator.close()
    finally:
        worker.shutdown()
        await database.close()
        journal.stopped()


async def _sweep_nonces(services: Services) -> None:
    never = asyncio.Event()
    while True:
        try:
            await services.registry.forget_nonces(services.clock.now())
        except Exception:
            _log.exception("old nonces could not be dropped; trying again in %.0f s", _NONCE_SWEEP_S)
        await services.clock.wait(never, _NONCE_SWEEP_S)


async def _health() -> Health:
    """Whether the coordinator is up."""
    return Health()
