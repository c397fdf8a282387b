"""Routes for operators of a run under way: pause, resume, stop, roll back, and the model versions."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import TypeAdapter

from umbel.aggregation.messages import REASON_CHARS_MAX
from umbel.aggregation.run.records import RunView, VersionRecord
from umbel.aggregation.types import RunId
from umbel.server import journal
from umbel.server.http.deps import ADMIN, Operator, State, StateDep, body_of, parse_json, problems
from umbel.server.http.routes_models import MODEL_RESPONSES, master_response
from umbel.server.problems import Refused
from umbel.server.runs.memory import view_of
from umbel.server.runs.orders import Order, Pause, Resume, Rollback, Start, Stop

router = APIRouter(prefix="/v1/admin", tags=["admin"], dependencies=[Operator], responses=problems(*ADMIN))
VERSIONS_MAX = 1000
_VERSION_MAX = (1 << 31) - 1  # the limit of the database column


@dataclass(frozen=True, slots=True)
class StopOrder:
    """POST /v1/admin/runs/{name}/stop: why the run ends."""

    reason: str = "stopped by an operator"

    def __post_init__(self) -> None:
        _require_reason(self.reason)


@dataclass(frozen=True, slots=True)
class PauseOrder:
    """POST /v1/admin/runs/{name}/pause: why; `now`: abandon the open round instead of letting it finish."""

    reason: str = "paused by an operator"
    now: bool = False

    def __post_init__(self) -> None:
        _require_reason(self.reason)


@dataclass(frozen=True, slots=True)
class RollbackOrder:
    """POST /v1/admin/runs/{name}/rollback: from which version the run continues, and why.

    `to`: a version's number, or `best` by the metric of the run file's `[stop]`.
    """

    to: int | Literal["best"]
    reason: str = "rolled back by an operator"

    def __post_init__(self) -> None:
        _require_reason(self.reason)
        if self.to != "best" and not 0 <= self.to <= _VERSION_MAX:
            raise ValueError(f'`to` must be a version number of at least 0, or "best", not {self.to}')


def _require_reason(reason: str) -> None:
    if not 1 <= len(reason) <= REASON_CHARS_MAX:
        raise ValueError(f"reason must have 1 to {REASON_CHARS_MAX} characters")


_STOP, _PAUSE, _ROLLBACK = TypeAdapter(StopOrder), TypeAdapter(PauseOrder), TypeAdapter(RollbackOrder)


@router.post("/runs/{name}/stop", openapi_extra=body_of(_STOP), responses=problems("unknown-run"))
async def post_stop(request: Request, state: StateDep, name: str) -> RunView:
    """End a run now. A round that has closed still commits; an open one is abandoned and its clients released."""
    order = parse_json(await request.body() or b"{}", _STOP)
    return await _obeyed(request, state, name, Stop(state.services.clock.now(), order.reason))


@router.post("/runs/{name}/pause", openapi_extra=body_of(_PAUSE), responses=problems("unknown-run", "run-over"))
async def post_pause(request: Request, state: StateDep, name: str) -> RunView:
    """Begin no further round until the run is resumed; its clients stay. Repeating the request changes nothing."""
    order = parse_json(await request.body() or b"{}", _PAUSE)
    return await _obeyed(request, state, name, Pause(state.services.clock.now(), order.reason, order.now))


@router.post("/runs/{name}/resume", responses=problems("unknown-run", "run-over"))
async def post_resume(request: Request, state: StateDep, name: str) -> RunView:
    """Resume a paused run. Repeating the request changes nothing."""
    await request.body()
    return await _obeyed(request, state, name, Resume(state.services.clock.now()))


@router.post("/runs/{name}/start", responses=problems("unknown-run", "run-over"))
async def post_start(request: Request, state: StateDep, name: str) -> RunView:
    """Begin the round with the clients that wait, if they are enough, without waiting for others.

    It changes nothing once the round has begun.
    """
    await request.body()
    return await _obeyed(request, state, name, Start(state.services.clock.now()))


@router.post(
    "/runs/{name}/rollback",
    openapi_extra=body_of(_ROLLBACK),
    responses=problems("unknown-run", "run-over", "unknown-version", "version-deleted"),
)
async def post_rollback(request: Request, state: StateDep, name: str) -> RunView:
    """Continue from an older version: it becomes the newest, under a new number. An attempt under way is abandoned."""
    order = parse_json(await request.body(), _ROLLBACK)
    return await _obeyed(request, state, name, Rollback(state.services.clock.now(), order.to, order.reason))


@router.get("/runs/{name}/versions", responses=problems("unknown-run"))
async def get_versions(
    state: StateDep,
    name: str,
    after: Annotated[int, Query(ge=-1, le=_VERSION_MAX)] = -1,
    limit: Annotated[int, Query(ge=1, le=VERSIONS_MAX)] = VERSIONS_MAX,
) -> tuple[VersionRecord, ...]:
    """The model versions of a run that come after version `after`, oldest first, at most `limit`."""
    driver = await state.coordinator.driver(RunId(name))
    found, rule = await state.services.versions.versions(driver.name, after, limit), driver.run.file.stop
    best = None if rule is None else await state.services.versions.best(driver.name, rule.mode)
    return tuple(replace(one, is_best=one.version == best) for one in found)


@router.get(
    "/runs/{name}/versions/{version}/master",
    response_class=Response,
    responses={**MODEL_RESPONSES, **problems("unknown-run", "unknown-version")},
)
async def get_master(
    request: Request, state: StateDep, name: str, version: Annotated[int, Path(ge=0, le=_VERSION_MAX)]
) -> Response:
    """The full-precision copy of a model version: what the next one is made from."""
    driver = await state.coordinator.driver(RunId(name))
    sha256 = await state.services.versions.master_sha256(driver.name, version)
    if sha256 is None:
        raise Refused("unknown-version", f"the run has no version {version}")
    return await master_response(request, state, sha256)


async def _obeyed(request: Request, state: State, name: str, order: Order) -> RunView:
    driver = await state.coordinator.driver(RunId(name))
    await driver.obey(order)
    journal.ordered(name, order.words, request.scope)
    return view_of(driver.live)
