"""Model files for devices."""

from typing import Any

from fastapi import APIRouter, Request, Response

from umbel.aggregation.types import ClientId
from umbel.server.blobs import model_key
from umbel.server.downloads import MEDIA_TYPE, file_response
from umbel.server.http import SIGNED, DeviceDep, State, StateDep, problems, require_no_body
from umbel.server.problems import Refused

router = APIRouter(prefix="/v1", tags=["models"])
MODEL_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}},
    206: {"description": "The range asked for"},
    304: {"description": "The model you have is this one"},
    **problems("unknown-model", "range-not-satisfiable"),
}


@router.head("/models/{sha256}", response_class=Response, include_in_schema=False)
@router.get(
    "/models/{sha256}",
    response_class=Response,
    responses={**MODEL_RESPONSES, **problems(*SIGNED)},
)
async def get_model(request: Request, device: DeviceDep, state: StateDep, sha256: str) -> Response:
    """A model version by its hash: safetensors, in ranges if you like."""
    await require_no_body(request, device)
    return await model_response(request, state, sha256, device.client)


async def model_response(request: Request, state: State, sha256: str, client: ClientId | None) -> Response:
    """Answer with a model file; what goes to a client that trains from it is counted."""
    drivers = [one for one in state.coordinator.drivers.values() if one.run.model.sha256 == sha256]
    model = drivers[0].run.model if drivers else await state.services.models.model(sha256)
    if model is None:
        raise Refused("unknown-model", "no such model here; take the hash from your assignment")

    def count(n_bytes: int) -> None:
        for driver in drivers:
            if client is not None and driver.open_round(client):
                driver.note_download(client, n_bytes)

    with state.services.blobs.local(model_key(sha256)) as path:
        return file_response(request, path, sha256, model.size_bytes, count)
