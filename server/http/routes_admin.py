"""Routes for operators: tokens, clients, models, runs."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.messages import WAIT_S_MAX, require_labels
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.run.records import RunProgress, RunView
from umbel.aggregation.types import ClientId, RunId, require_slug
from umbel.server.blobs.blobs import Blob, model_key
from umbel.server.devices.clients import ClientView
from umbel.server.devices.enrolments import Binding
from umbel.server.devices.waiting import HeldRequest
from umbel.server.http.deps import (
    ADMIN,
    Operator,
    State,
    StateDep,
    binary_body,
    body_of,
    either_body,
    parse_json,
    problems,
)
from umbel.server.http.new_run import RUN_ORDER, read_new_run
from umbel.server.http.routes_models import MODEL_RESPONSES, model_response
from umbel.server.problems import Refused
from umbel.server.runs.driver import RunDriver
from umbel.server.runs.memory import PROGRESS_BELL, view_of
from umbel.server.sums.torch_import import torch_imported

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Operator], responses=problems(*ADMIN))
TOKENS_MAX = 1000
ENDED_MAX = 200
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """POST /v1/admin/tokens: the number of one-time tokens, and for how many seconds they are valid.

    `client`: the name that the one token binds; None: any name. `labels`: the labels that the tokens bind.
    """

    count: int = 1
    ttl_s: float = 7 * 86400.0
    client: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if not 1 <= self.count <= TOKENS_MAX:
            raise ValueError(f"count must lie between 1 and {TOKENS_MAX}, not {self.count}")
        if not 1 <= self.ttl_s <= 366 * 86400:
            raise ValueError(f"ttl_s must lie between 1 and {366 * 86400} seconds (366 days), not {self.ttl_s}")
        if self.client is not None:
            require_slug(self.client, "client")
            if self.count != 1:
                raise ValueError(
                    f"count must be 1 for a token with a client name, not {self.count}; make one token for each name"
                )
        require_labels(self.labels)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The new tokens. The coordinator keeps only their hashes."""

    tokens: tuple[str, ...]


_TOKEN_ORDER = TypeAdapter(TokenOrder)


@router.post("/tokens", openapi_extra=body_of(_TOKEN_ORDER), responses=problems("name-taken"))
async def post_tokens(request: Request, state: StateDep) -> Tokens:
    """Make one-time enrolment tokens, which may bind the name of a client that is not enrolled yet, and labels."""
    order = parse_json(await request.body(), _TOKEN_ORDER)
    tokens = tuple(secrets.token_urlsafe(24) for _ in range(order.count))
    binding = Binding(order.client, order.labels)
    await state.services.registry.enrolments.add_tokens(tokens, state.services.clock.now(), order.ttl_s, binding)
    return Tokens(tokens)


@router.get("/clients")
async def get_clients(state: StateDep) -> tuple[ClientView, ...]:
    """Every enrolled client."""
    return await state.services.registry.clients()


@router.delete("/clients/{client}", status_code=204, responses=problems("not-found"))
async def delete_client(state: StateDep, client: str) -> Response:
    """Remove a client: its requests are refused from now on. Its name cannot be used again."""
    if not await state.services.registry.revoke(client, state.services.clock.now()):
        raise Refused("not-found", f"no client named {client!r} is enrolled; umbel client list shows all clients")
    await state.coordinator.release(ClientId(client))
    return Response(status_code=204)


@router.put(
    "/models/{sha256}", openapi_extra=binary_body("application/octet-stream"), responses=problems("wrong-digest")
)
async def put_model(request: Request, state: StateDep, sha256: str) -> ModelRef:
    """Upload a model from which runs can start. Repeating the request changes nothing."""
    blobs, loop = state.services.blobs, asyncio.get_running_loop()
    with blobs.scratch() as path:
        came = await _write_stream(request.stream(), path)
        if came.sha256 != sha256:
            raise Refused("wrong-digest", "the model's SHA-256 is not the one in the address; send the file again")
        await torch_imported()
        from umbel.server.sums.model_files import inspect_model

        try:
            layout = await loop.run_in_executor(state.services.worker, inspect_model, path)
        except LayoutError as error:
            raise Refused("malformed-request", str(error)) from error
        await loop.run_in_executor(state.services.worker, blobs.put, path, model_key(sha256))
    ref = ModelRef(0, sha256, came.size_bytes, layout.digest)
    await state.services.models.add_model(ref, layout, state.services.clock.now())
    return ref


@router.head("/models/{sha256}", response_class=Response, include_in_schema=False)
@router.get(
    "/models/{sha256}",
    response_class=Response,
    responses=MODEL_RESPONSES,
)
async def get_admin_model(request: Request, state: StateDep, sha256: str) -> Response:
    """A model version by its hash."""
    return await model_response(request, state, sha256, None)


@router.put(
    "/runs/{name}",
    openapi_extra=either_body(binary_body("application/toml"), body_of(RUN_ORDER)),
    responses={
        201: {"model": RunView, "description": "The run is new"},
        **problems("run-exists", "unknown-model", "first-model-in-use"),
    },
)
async def put_run(
    request: Request, response: Response, state: StateDep, name: str, model: str, same_first_model: bool = False
) -> RunView:
    """Create a run from an uploaded model and a run file (TOML; or JSON that also has the run's member list).

    Repeating the request changes nothing. If the run has no member list yet, the request can add it.
    `same_first_model` allows a secure run to begin with a model that another secure run trains.
    """
    new = await asyncio.to_thread(read_new_run, await request.body(), request.headers.get("content-type", ""))
    if new.file.name != name:
        raise Refused(
            "malformed-request",
            f"the run file has the name {new.file.name!r}, but the address has the name {name!r}; use the same name",
        )
    driver, is_new = await state.coordinator.create_run(new.file, model, new.members, may_share_model=same_first_model)
    response.status_code = 201 if is_new else 200
    return view_of(driver.live)


@router.get("/runs")
async def get_runs(state: StateDep) -> tuple[RunView, ...]:
    """Every run, the oldest first."""
    return state.coordinator.views()


@router.get("/runs/{name}", responses=problems("unknown-run"))
async def get_run(state: StateDep, name: str) -> RunView:
    """The state of one run."""
    return view_of((await state.coordinator.driver(RunId(name))).live)


@router.get("/runs/{name}/progress", responses=problems("unknown-run", "shutting-down"))
async def get_progress(
    request: Request,
    state: StateDep,
    name: str,
    after: Annotated[int, Query(ge=0, le=1 << 53)] = 0,
    wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0.0,
    mark: Annotated[str, Query(max_length=64)] = "",
) -> RunProgress:
    """The ended attempts after the first `after` ones, and the round under way; held open until something changes.

    `mark`: that of the last answer. If something has changed since then, the answer comes at once.
    """
    driver = await state.coordinator.driver(RunId(name))
    with driver.bells.listen(PROGRESS_BELL) as bell:
        if wait_s == 0 or await _has_ended(state, driver, after):
            return await _progress(state, driver, after)
        state.coordinator.refuse_if_closing()
        await request.body()
        if not driver.now.has_changed_since(mark):
            await HeldRequest(request.receive).hold(state.services.clock, bell, wait_s)
    if not await _has_ended(state, driver, after):
        await driver.now.let_changes_gather()
    return await _progress(state, driver, after)


async def _has_ended(state: State, driver: RunDriver, after: int) -> bool:
    """Whether the run is over, or more than `after` of its attempts have ended."""
    return driver.is_over or bool(await state.services.rounds.ended(driver.name, after, 1))


async def _progress(state: State, driver: RunDriver, after: int) -> RunProgress:
    mark = driver.now.mark  # read first, because the rest may change meanwhile
    view = view_of(driver.live)  # before the records, so that a run that is over comes with its last round
    ended = await state.services.rounds.ended(driver.name, after, ENDED_MAX)
    away = await state.services.turned_away.newest(driver.name, state.services.clock.now())
    return RunProgress(view, ended, after + len(ended), await driver.now.look(), away, mark)


async def _write_stream(pieces: AsyncIterator[bytes], path: Path) -> Blob:
    """Write and hash a model as it comes, on threads: a slow disk must not stall the requests of devices."""
    digest, size_bytes, batch = hashlib.sha256(), 0, bytearray()

    def write(file: FileIO) -> None:
        left = memoryview(batch)
        digest.update(left)
        while left:
            left = left[file.write(left) :]

    with FileIO(path, "x") as file:
        async for piece in pieces:
            batch += piece
            size_bytes += len(piece)
            if len(batch) >= _BATCH_BYTES:
                await asyncio.to_thread(write, file)
                batch = bytearray()
        await asyncio.to_thread(write, file)
    return Blob(digest.hexdigest(), size_bytes)
