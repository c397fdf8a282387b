"""Routes for the messages of secure rounds, which are binary (docs/reference/secure-aggregation.md)."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from umbel.aggregation.messages import WAIT_S_MAX
from umbel.aggregation.plans.assignment import run_of
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import AssignmentId
from umbel.server.http.auth import read_body
from umbel.server.http.deps import SIGNED, DeviceDep, StateDep, binary_body, problems, require_no_body
from umbel.server.problems import Refused

router = APIRouter(prefix="/v1/assignments/{assignment}/secure", tags=["secure rounds"])
OCTETS = "application/octet-stream"
_RESPONSES = problems(
    *SIGNED, "unknown-assignment", "assignment-closed", "changed-message", "not-found", "shutting-down"
)
_TAKEN: Mapping[int | str, dict[str, Any]] = {
    202: {"description": "In progress, and kept only in memory: send the same message again."}
}
_TOLD: Mapping[int | str, dict[str, Any]] = {
    200: {"description": "The message for the client's turn in this phase.", "content": {OCTETS: {}}},
    204: {"description": "The phase has not begun: ask again."},
}
_WAIT = Annotated[float, Query(ge=0, le=WAIT_S_MAX)]


@router.put(
    "/{phase}",
    status_code=204,
    response_class=Response,
    responses={**_RESPONSES, **_TAKEN},
    openapi_extra=binary_body(OCTETS),
)
async def put_message(
    request: Request, device: DeviceDep, state: StateDep, assignment: str, phase: str, wait_s: _WAIT = 0.0
) -> Response:
    """A client's message of a phase. 204: the message is stored.

    Revealed shares are never stored. For them, 204: the sum is unmasked or abandoned. 202: it is in progress; send the
    same message again.
    """
    body = await read_body(request, device.body_sha256)
    with state.lines.open(device.client, request.receive, run_of(assignment)) as line:
        is_done = await state.reception.secure.take_message(
            device.client, AssignmentId(assignment), _phase(phase), body, (wait_s, line)
        )
    return Response(status_code=204 if is_done else 202)


@router.get("/{phase}", response_class=Response, responses={**_RESPONSES, **_TOLD})
async def get_message(
    request: Request, device: DeviceDep, state: StateDep, assignment: str, phase: str, wait_s: _WAIT = 0.0
) -> Response:
    """The message that a client needs for its turn in a phase; held open until it is ready. 204: not ready yet."""
    await require_no_body(request, device)
    with state.lines.open(device.client, request.receive, run_of(assignment)) as line:
        told = await state.reception.secure.message_for(
            device.client, AssignmentId(assignment), _phase(phase), (wait_s, line)
        )
    return Response(status_code=204) if told is None else Response(told, media_type=OCTETS)


def _phase(name: str) -> Phase:
    try:
        return Phase(name)
    except ValueError as error:
        phases = ", ".join(phase.value for phase in Phase)
        raise Refused("not-found", f"there is no such phase; the phases of a secure round are {phases}") from error
