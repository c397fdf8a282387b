"""The coordinator as an ASGI application: `create_app(settings, clock)`. Nothing happens at import time.

Beside its routes it cleans periodically: expired rows, and blobs that a crash left behind. Every replica does all of
it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from umbel.server import journal, problems
from umbel.server.blobs.choose import open_blobs
from umbel.server.clock import Clock, SystemClock
from umbel.server.devices.clients import Registry
from umbel.server.devices.turned_away import TurnedAwayStore
from umbel.server.devices.waiting import Heard
from umbel.server.http import (
    routes_admin,
    routes_audit,
    routes_devices,
    routes_lifecycle,
    routes_models,
    routes_secure,
    routes_uploads,
)
from umbel.server.http.deps import ANY, State
from umbel.server.http.deps import problems as declared
from umbel.server.http.limits import BodyLimits, Cap, cap_at, caps_of
from umbel.server.http.routes_devices import Handler
from umbel.server.services import DecisionThread, Services
from umbel.server.settings import Settings
from umbel.server.stopping import stopped
from umbel.server.store.audit_rows import AuditStore
from umbel.server.store.database import Database
from umbel.server.store.keys import AdminKey, AuditKey
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.replicas import OUTAGE_S, RelayStore, Replicas, Uptime
from umbel.server.store.rounds import MemberListStore, RoundStore
from umbel.server.store.uploads import UploadStore
from umbel.server.store.versions import ModelStore, VersionStore
from umbel.server.store.waiters import WaiterStore
from umbel.server.sums.model_removal import sweep_models

_log = logging.getLogger(__name__)
_NONCES_S = 60.0
_REST_S = 3600.0


class CoordinatorAPI(FastAPI):
    """FastAPI with direct routes, which are looked up by method and path before the framework is asked.

    FastAPI matches routes one after the other and wraps each call in two exit stacks. That costs a check-in as much as
    everything else together (docs/decisions/0018-own-connections.md). Direct routes are routes of the application too,
    so OpenAPI lists them.
    """

    _direct: Mapping[tuple[str, str], BodyLimits]

    def add_direct_routes(self, handlers: Mapping[tuple[str, str], Handler], caps: Sequence[Cap]) -> None:
        """Answer these methods and paths directly, with the same caps on bodies as everywhere."""
        self._direct = {
            (method, path): BodyLimits(_direct(handler), [cap_at(path, caps)])
            for (method, path), handler in handlers.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = self._direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if direct is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await direct(scope, receive, send)


def _direct(handler: Handler) -> ASGIApp:
    """One handler as an application that answers its own errors."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await handler(request)
        except Exception as error:
            response = await problems.answer_to(request, error)
        await response(scope, receive, send)

    return app


@dataclass(frozen=True, slots=True)
class Health:
    """GET /v1/health."""

    status: str = "ok"


def create_app(settings: Settings, clock: Clock | None = None, outage_s: float = OUTAGE_S) -> FastAPI:
    """A coordinator over the data directory of `settings`. Only one at a time may work on a directory.

    A gap in the coordinators' signs of life that is longer than `outage_s` is an outage, which no window counts.
    """
    clock = clock or SystemClock()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with running(settings, clock, outage_s) as state:
            app.state.umbel = state
            yield

    app = CoordinatorAPI(
        title="umbel coordinator",
        version="1",
        openapi_url="/v1/openapi.json",
        docs_url=None,  # the pages would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to whatever Host the request names
        lifespan=lifespan,
    )
    for routes in (
        routes_devices,
        routes_secure,
        routes_models,
        routes_uploads,
        routes_admin,
        routes_lifecycle,
        routes_audit,
    ):
        # A router's routes are whole already. `include_router` would build each again, in every application.
        app.router.routes.extend(routes.router.routes)
    app.add_api_route("/v1/health", _health, tags=["health"], responses=declared(*ANY))
    app.add_middleware(BodyLimits, caps=caps_of(settings))
    app.add_direct_routes(routes_devices.DIRECT, caps_of(settings))
    problems.install(app)
    return app


@asynccontextmanager
async def running(settings: Settings, clock: Clock, outage_s: float) -> AsyncGenerator[State]:
    """Start a coordinator and everything it consists of, and close it at the end of the block."""
    settings.data.mkdir(parents=True, exist_ok=True)
    database = Database(settings.database)
    worker, checker = ThreadPoolExecutor(1, "umbel-worker"), ThreadPoolExecutor(1, "umbel-checker")
    audit_key = AuditKey.load(settings.audit_key_path)
    decider = DecisionThread()
    uptime = Uptime(database, clock, outage_s)
    services = _services(settings, clock, database, uptime, (worker, checker), audit_key, decider)
    try:
        await asyncio.to_thread(services.blobs.prepare)
        await database.migrate()
        await services.replicas.start()
        state = State(services, AdminKey.load(settings.admin_key_path))
        await state.coordinator.start()
        journal.started(settings.data, len(state.coordinator.views()))
        house = asyncio.create_task(keep_house(services), name="housekeeping")
        try:
            yield state
        finally:
            await stopped(house)
            await state.coordinator.close()
            for close in (services.registry.close, services.replicas.close):
                with suppress(DatabaseAway):  # nothing of it was promised to a client
                    await close()
    finally:
        worker.shutdown()
        checker.shutdown()
        decider.close()
        await database.close()
        journal.stopped()


def _services(
    settings: Settings,
    clock: Clock,
    database: Database,
    uptime: Uptime,
    threads: tuple[Executor, Executor],
    audit_key: AuditKey,
    decider: DecisionThread,
) -> Services:
    replicas = Replicas(database, clock)
    waiters, member_lists = WaiterStore(database), MemberListStore(database)
    return Services(
        settings=settings,
        clock=clock,
        replicas=replicas,
        uptime=uptime,
        registry=Registry(database, waiters),
        models=ModelStore(database),
        rounds=RoundStore(database, replicas.id, member_lists),
        member_lists=member_lists,
        relay=RelayStore(database, replicas.id),
        audit_key=audit_key,
        audits=AuditStore(database),
        versions=VersionStore(database),
        uploads=UploadStore(database),
        waiters=waiters,
        turned_away=TurnedAwayStore(database),
        blobs=open_blobs(settings),
        heard=Heard(clock),
        agents=Heard(clock),
        worker=threads[0],
        checker=threads[1],
        decider=decider,
    )


async def _health() -> Health:
    """Whether the coordinator is up."""
    return Health()


async def keep_house(services: Services) -> None:
    """Clean for ever, from the start on: a crash may have kept the updates of an ended round."""
    await asyncio.gather(
        _repeat("expired nonces", _NONCES_S, lambda: services.registry.forget_nonces(services.clock.now())),
        _repeat("blobs of ended rounds", _REST_S, lambda: sweep_blobs(services)),
        _repeat("models that no run refers to", _REST_S, lambda: sweep_models(services)),
        _repeat("records of clients that left long ago", _REST_S, lambda: services.waiters.sweep(services.clock.now())),
        _repeat("old words on absent clients", _REST_S, lambda: services.turned_away.sweep(services.clock.now())),
        _repeat("old tokens", _REST_S, lambda: services.registry.enrolments.sweep(services.clock.now())),
    )


async def sweep_blobs(services: Services) -> None:
    """Remove updates and partial sums of rounds that are over.

    The keys are listed before the open rounds, so that blobs of a round that opens in between are not among them.
    """
    updates = await asyncio.to_thread(lambda: list(services.blobs.keys("updates")))
    partials = await asyncio.to_thread(lambda: list(services.blobs.keys("partials")))
    assignments, rounds = await services.rounds.open_names()
    left = [key for key in updates if key.split("/")[1] not in assignments]
    left += [key for key in partials if key.split("/")[1] not in rounds]
    if left:
        await asyncio.to_thread(services.blobs.delete, left)
        _log.info("removed %d blobs of rounds that are over", len(left))


async def _repeat(what: str, pause_s: float, sweep: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await sweep()
        except DatabaseAway:
            pass  # logged once, by the database
        except Exception:
            _log.exception("could not remove %s; trying again in %.0f s", what, pause_s)
        await asyncio.sleep(pause_s)
