"""Routes for auditors: the public audit key, a run's bundles, and the updates and models that bundles name."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from umbel.aggregation.audit.bundle import PublicAuditKey
from umbel.aggregation.types import ClientId, RunId
from umbel.server.blobs.blobs import BlobStore
from umbel.server.http.deps import ADMIN, ANY, Operator, State, StateDep, problems
from umbel.server.http.routes_models import MODEL_RESPONSES, master_response
from umbel.server.problems import Refused
from umbel.server.store.audit_rows import StoredBundle
from umbel.server.store.stored import StoredUpload
from umbel.server.sums.updates import Whole, fill

PAGE_MAX = 16
_PIECE_BYTES = 1 << 18
_BINARY: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
_PAGE: dict[int | str, dict[str, Any]] = {200: {"description": "See docs/reference/audit-bundle.md"}}
router = APIRouter(tags=["audit"])
admin = APIRouter(prefix="/v1/admin/runs/{name}/audit", tags=["audit"], dependencies=[Operator])
Number = Annotated[int, Path(ge=0, lt=1 << 31)]


@router.get("/v1/audit-key", responses=problems(*ANY))
async def get_audit_key(state: StateDep) -> PublicAuditKey:
    """The key that signs audit bundles. Keep a copy from a time when you trust the coordinator."""
    return PublicAuditKey(state.services.audit_key.public)


@admin.get("", responses={**_PAGE, **problems(*ADMIN, "unknown-run")})
async def get_audit(state: StateDep, name: str, after: Annotated[int, Query(ge=0, lt=1 << 31)] = 0) -> Response:
    """A run's audit bundles from number `after` on; with none, there are no more."""
    driver = await state.coordinator.driver(RunId(name))
    bundles = await state.services.audits.page(driver.name, after, PAGE_MAX)
    return Response(_page(bundles, after), media_type="application/json")


@admin.get(
    "/{number}/updates/{client}",
    response_class=Response,
    responses={**_BINARY, **problems(*ADMIN, "unknown-run", "unknown-upload", "storage-unavailable")},
)
async def get_update(state: StateDep, name: str, number: Number, client: str) -> Response:
    """An update that a bundle names, if the run's policy keeps it."""
    bundle = await _bundle(state, name, number)
    round_id = bundle.round_id
    upload = None if round_id is None else await state.services.audits.update(round_id, ClientId(client))
    if upload is None:
        raise Refused("unknown-upload", "this update is not kept; the round's audit bundle says why")
    headers = {"Content-Length": str(upload.length), "Cache-Control": "no-store"}
    pieces = _pieces(state.services.blobs, upload)
    return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")


@admin.get(
    "/{number}/model",
    response_class=Response,
    responses={**MODEL_RESPONSES, **problems(*ADMIN, "unknown-run")},
)
async def get_start(request: Request, state: StateDep, name: str, number: Number) -> Response:
    """The full-precision model with which a bundle's attempt began."""
    facts = json.loads((await _bundle(state, name, number)).text)["facts"]
    return await master_response(request, state, facts.get("model_in", facts.get("model"))["master_sha256"])


router.include_router(admin)


async def _bundle(state: State, name: str, number: int) -> StoredBundle:
    driver = await state.coordinator.driver(RunId(name))
    found = await state.services.audits.bundle(driver.name, number)
    if found is None:
        raise Refused("not-found", f"the run has no audit bundle {number}")
    return found


def _page(bundles: Sequence[StoredBundle], after: int) -> str:
    """A page as JSON, with the stored text of the bundles."""
    lines = ",".join(_line(one) for one in bundles)
    return f'{{"bundles":[{lines}],"next_after":{after + len(bundles)}}}'


def _line(one: StoredBundle) -> str:
    beside = {"sha256": one.sha256, "signature": one.signature, "updates_deleted_at": one.updates_deleted_at}
    return f'{{"bundle":{one.text},{json.dumps(beside)[1:]}'


async def _pieces(blobs: BlobStore, upload: StoredUpload) -> AsyncIterator[bytes]:
    with Whole(blobs, upload.chunks) as update:
        while piece := await asyncio.to_thread(_read, update):
            yield piece


def _read(update: Whole) -> bytes:
    buffer = bytearray(_PIECE_BYTES)
    return bytes(buffer[: fill(update, memoryview(buffer))])
