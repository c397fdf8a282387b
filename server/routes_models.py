"""Model files for devices."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from umbel.aggregation.types import ClientId
from umbel.server.blobs import model_key
from umbel.server.downloads import MEDIA_TYPE, FileAnswer, download, redirect, without_body
from umbel.server.http import SIGNED, DeviceDep, State, StateDep, problems, require_no_body
from umbel.server.problems import Refused

router = APIRouter(prefix="/v1", tags=["models"])
MODEL_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
    206: {"description": "The range asked for"},
    304: {"description": "The model you have is this one"},
    **problems("unknown-model", "range-not-satisfiable", "storage-unavailable"),
}


_LINK_S = 300.0  # for clocks that differ; a download that has begun goes on
_REDIRECT: dict[int | str, dict[str, Any]] = {
    307: {"description": "Where the model can be read for the next minutes, without a signature of yours"}
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
    """A model version by its hash: safetensors, in ranges if you like. `direct`: from here, not by a redirect."""
    await require_no_body(request, device)
    return await model_response(request, state, sha256, device.client, may_redirect=not direct)


async def model_response(
    request: Request, state: State, sha256: str, client: ClientId | None, may_redirect: bool = False
) -> Response:
    """Answer with a model file; what goes to a client that trains from it is counted."""
    drivers = [one for one in state.coordinator.drivers.values() if one.run.model.sha256 == sha256]
    model = drivers[0].run.model if drivers else await state.services.models.model(sha256)
    if model is None:
        raise Refused("unknown-model", "no such model here; take the hash from your assignment")
    wanted, key = download(request, sha256, model.size_bytes), model_key(sha256)
    if (answer := without_body(request, wanted)) is not None:
        return answer

    def count(n_bytes: int) -> None:
        for driver in drivers:
            if client is not None and driver.open_round(client):
                driver.note_download(client, n_bytes)

    if may_redirect and (link := await _link(state, key)) is not None:
        count(wanted.span.n_bytes)  # all that can be known of it here
        return redirect(link)
    return FileAnswer(state.copies, key, wanted, count)


async def _link(state: State, key: str) -> str | None:
    if not state.services.settings.download_links:
        return None
    return await asyncio.to_thread(state.services.blobs.link, key, _LINK_S)
