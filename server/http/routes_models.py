"""Routes for model files, and for changes from one model version to the next. Both are named by their hash."""

import asyncio
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request, Response

from umbel.aggregation.types import ClientId
from umbel.server.blobs.blobs import model_key
from umbel.server.devices.fitness import stranger
from umbel.server.http.deps import SIGNED, DeviceDep, State, StateDep, problems, require_no_body
from umbel.server.http.downloads import CHANGE_MEDIA_TYPE, MEDIA_TYPE, FileAnswer, download, redirect, without_body
from umbel.server.problems import Refused
from umbel.server.runs.driver import RunDriver
from umbel.server.store.stored import StoredRun

router = APIRouter(prefix="/v1", tags=["models"])
_BINARY = {"schema": {"type": "string", "format": "binary"}}
MODEL_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: _BINARY, CHANGE_MEDIA_TYPE: _BINARY}},
    206: {"description": "The range asked for"},
    304: {"description": "The client has this model already"},
    **problems("unknown-model", "range-not-satisfiable", "storage-unavailable"),
}


_LINK_S = 300.0  # allows for clocks that differ; a download under way continues
_REDIRECT: dict[int | str, dict[str, Any]] = {
    307: {"description": "A link to the model in the bucket: valid for minutes, to be fetched without a signature"}
}


@router.head("/models/{sha256}", response_class=Response, include_in_schema=False)
@router.get(
    "/models/{sha256}",
    response_class=Response,
    responses={**MODEL_RESPONSES, **_REDIRECT, **problems(*SIGNED)},
)
async def get_model(
    request: Request, device: DeviceDep, state: StateDep, sha256: str, direct: bool = False
) -> Response:
    """A model version, or a change to one, by its hash; range requests are possible.

    Only for clients that have, or had, an assignment in its run. `direct`: answer with the file, never with a redirect.
    """
    await require_no_body(request, device)
    return await model_response(request, state, sha256, device.client, may_redirect=not direct)


async def model_response(
    request: Request, state: State, sha256: str, client: ClientId | None, may_redirect: bool = False
) -> Response:
    """Answer with a model file or a change. Bytes sent to a client of an open round are counted.

    `client`: gets the files of its runs only; None: an operator, for whom every file is readable.
    """
    drivers = [one for one in state.coordinator.drivers.values() if _offered(one.run, sha256) is not None]
    found = _offered(drivers[0].run, sha256) if drivers else await _stored(state, sha256)
    if found is None or (client is not None and not await may_fetch(state, drivers, client, sha256)):
        raise Refused(
            "unknown-model",
            "there is no such model, or this client may not download it; take the hash from your assignment",
        )
    size_bytes, media_type = found
    wanted, key = download(request, sha256, size_bytes, media_type), model_key(sha256)
    if (answer := without_body(request, wanted)) is not None:
        return answer

    def count(n_bytes: int) -> None:
        for driver in drivers:
            if client is not None and driver.open_round(client):
                driver.note_download(client, n_bytes)

    if may_redirect and (link := await _link(state, key)) is not None:
        count(wanted.span.n_bytes)  # the bucket does not report what it sends
        return redirect(link)
    return FileAnswer(state.copies, key, wanted, count)


async def master_response(request: Request, state: State, sha256: str) -> Response:
    """Answer an operator with a full-precision copy."""
    key = model_key(sha256)
    size_bytes = await asyncio.to_thread(state.services.blobs.size, key)
    if size_bytes is None:
        raise Refused(
            "unknown-model",
            "this model version was deleted, because the run file's retention.versions keeps only newer ones",
        )
    wanted = download(request, sha256, size_bytes)
    return without_body(request, wanted) or FileAnswer(state.copies, key, wanted, lambda _: None)


def _offered(run: StoredRun, sha256: str) -> tuple[int, str] | None:
    """Length and media type of this run's newest model, or of a change to it."""
    if sha256 == run.model.sha256:
        return run.model.size_bytes, MEDIA_TYPE
    sizes = [change.size_bytes for change in run.changes if change.sha256 == sha256]
    return (sizes[0], CHANGE_MEDIA_TYPE) if sizes else None


async def _stored(state: State, sha256: str) -> tuple[int, str] | None:
    """Length and media type of any other file, from the database."""
    if (model := await state.services.models.model(sha256)) is not None:
        return model.size_bytes, MEDIA_TYPE
    n_bytes = await state.services.versions.change_bytes(sha256)
    return None if n_bytes is None else (n_bytes, CHANGE_MEDIA_TYPE)


async def may_fetch(state: State, offering: Collection[RunDriver], client: ClientId, sha256: str) -> bool:
    """Whether a file belongs to a run in which this client has, or had, an assignment and may still take part.

    `offering`: the runs of which it is the newest model, or a change to it. Current assignments are in memory. Those of
    ended attempts, or of attempts that another replica has just begun, are in the database.
    """
    for driver in offering:
        if driver.knows(client, driver.assignment_id(client)) and await _is_for(state, driver, client):
            return True
    for run in await state.services.versions.runs_with(client, sha256):
        if await _is_for(state, await state.coordinator.driver(run), client):
            return True
    return False


async def _is_for(state: State, driver: RunDriver, client: ClientId) -> bool:
    """Whether a run's member list, if it has one, admits a client."""
    return await stranger(state.services.registry, await driver.members.list(), client) is None


async def _link(state: State, key: str) -> str | None:
    if not state.services.settings.download_links:
        return None
    return await asyncio.to_thread(state.services.blobs.link, key, _LINK_S)
