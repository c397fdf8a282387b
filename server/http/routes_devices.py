"""Routes for devices: enrol, see the open runs, check in, look at an assignment, report, decline."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, TypeAdapter

from umbel.aggregation.audit.bundle import SignedReport
from umbel.aggregation.audit.chain import report_target
from umbel.aggregation.canonical import without_unused
from umbel.aggregation.messages import (
    MARK_CHARS_MAX,
    WAIT_S_MAX,
    AssignmentCounts,
    AssignmentStatus,
    CheckedIn,
    CheckIn,
    Decline,
    Enrolled,
    Enrolment,
    NotComing,
    OpenRuns,
    ReportAnswer,
)
from umbel.aggregation.plans.assignment import run_of
from umbel.aggregation.reports import EvaluationDone, MaskedInput, Work, WorkDone
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.http.auth import VerifiedDevice, caller_of, claims_of, enrol, libsodium_check, read_body, target_of
from umbel.server.http.deps import (
    SIGNED,
    DeviceDep,
    State,
    StateDep,
    body_of,
    json_answer,
    parse_json,
    problems,
    read_message,
    require_no_body,
    state_in,
)
from umbel.server.problems import Refused
from umbel.server.runs.open_runs import RunsQuery
from umbel.server.runs.reception import Visit

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
router = APIRouter(prefix="/v1", tags=["devices"])
_ENROLMENT, _CHECK_IN = TypeAdapter(Enrolment), TypeAdapter(CheckIn)
_CHECKED_IN = TypeAdapter(CheckedIn)
_WORK: TypeAdapter[Work] = TypeAdapter(Annotated[WorkDone | MaskedInput, Field(union_mode="left_to_right")])
_EVALUATION, _DECLINE = TypeAdapter(EvaluationDone), TypeAdapter(Decline)
_NOT_COMING = TypeAdapter(NotComing)
_ENROLMENT_PROBLEMS = ("unknown-token", "expired-token", "token-used", "token-mismatch", "name-taken", "key-taken")


@router.post("/enrolments", responses=problems(*SIGNED, *_ENROLMENT_PROBLEMS), openapi_extra=body_of(_ENROLMENT))
async def post_enrolment(request: Request, state: StateDep) -> Enrolled:
    """Exchange a one-time token for a name and a key. Signed with the key in the body."""
    enrolment = await read_message(request, claims_of(request).body_sha256, _ENROLMENT)
    is_counted_on = state.coordinator.counts_on(ClientId(enrolment.client))
    await enrol(request, state.services, enrolment, is_counted_on)
    return Enrolled(enrolment.client, state.services.clock.now())


@router.post(
    "/check-ins",
    response_model=CheckedIn,
    responses=problems(*SIGNED, "unknown-run", "wrong-layout", "unbound-name", "sample-count-needed", "shutting-down"),
    openapi_extra=body_of(_CHECK_IN),
)
async def post_check_in(request: Request) -> Response:
    """Wait for work in a run; held open for up to `wait_s`."""
    state = state_in(request)
    caller = await caller_of(request, state.services, libsodium_check)
    message = await read_message(request, caller.claims.body_sha256, _CHECK_IN)
    line = partial(state.lines.open, caller.client, request.receive, message.run)
    visit = Visit(caller.client, message, caller.admit, line)
    answer = await state.reception.check_in(visit)
    if answer.assignment is None:
        return json_answer(_CHECKED_IN, answer)
    return JSONResponse(without_unused(answer, _CHECKED_IN.dump_python(answer, mode="json")))


@router.get("/runs", responses=problems(*SIGNED, "shutting-down"))
async def get_runs(
    request: Request,
    device: DeviceDep,
    state: StateDep,
    after: Annotated[str, Query(max_length=63)] = "",
    mark: Annotated[str, Query(max_length=MARK_CHARS_MAX)] = "",
    wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0.0,
) -> OpenRuns:
    """The runs that are open to this client, at most 100 a page. Held open while they have this `mark`.

    A run is open until it is over. A run with a member list is open only to its members.
    """
    await require_no_body(request, device)
    with state.lines.open(device.client, request.receive) as line:
        return await state.open_runs.page(device.client, RunsQuery(after, mark, wait_s), line)


@router.put(
    "/runs/{run}/not-coming",
    status_code=204,
    responses=problems(*SIGNED, "unknown-run", "not-a-member"),
    openapi_extra=body_of(_NOT_COMING),
)
async def put_not_coming(request: Request, device: DeviceDep, state: StateDep, run: str) -> Response:
    """Tell the operator why this client does not check in for a run that is open to it."""
    word = await read_message(request, device.body_sha256, _NOT_COMING)
    await state.reception.not_coming(device.client, RunId(run), word)
    return Response(status_code=204)


@router.get("/assignments/{assignment}", responses=problems(*SIGNED, "unknown-assignment", "shutting-down"))
async def get_assignment(
    request: Request,
    device: DeviceDep,
    state: StateDep,
    assignment: str,
    wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0.0,
) -> AssignmentStatus:
    """Whether the round still waits for this report. Held open while it does; answered at once when it does not."""
    await require_no_body(request, device)
    with state.lines.open(device.client, request.receive, run_of(assignment)) as line:
        return await state.reception.status(device.client, AssignmentId(assignment), wait_s, line)


@router.get("/assignments/{assignment}/counts", responses=problems(*SIGNED, "unknown-assignment", "shutting-down"))
async def get_counts(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> AssignmentCounts:
    """Whether the run's newest model has the work of this assignment in it."""
    await require_no_body(request, device)
    return await state.reception.counts(device.client, AssignmentId(assignment))


@router.put(
    "/assignments/{assignment}/report",
    responses=problems(*SIGNED, "unknown-assignment", "report-refused", "upload-incomplete"),
    openapi_extra=body_of(_WORK),
)
async def put_report(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> ReportAnswer:
    """Report an uploaded update. Answered when the report is stored."""
    return await _report(request, device, state, AssignmentId(assignment), _WORK, has_upload=True)


@router.put(
    "/assignments/{assignment}/evaluation",
    responses=problems(*SIGNED, "unknown-assignment", "report-refused"),
    openapi_extra=body_of(_EVALUATION),
)
async def put_evaluation(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> ReportAnswer:
    """Report an evaluation of the model, if the assignment asks for one. Answered when the report is stored."""
    return await _report(request, device, state, AssignmentId(assignment), _EVALUATION, has_upload=False)


@router.put(
    "/assignments/{assignment}/decline",
    status_code=204,
    responses=problems(*SIGNED, "unknown-assignment"),
    openapi_extra=body_of(_DECLINE),
)
async def put_decline(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> Response:
    """Decline the assignment, with a reason; or, after a secure round has closed, decline to sign its sum."""
    message = await read_message(request, device.body_sha256, _DECLINE)
    await state.reception.decline(device.client, AssignmentId(assignment), message.reason)
    return Response(status_code=204)


async def _report(
    request: Request,
    device: VerifiedDevice,
    state: State,
    assignment: AssignmentId,
    adapter: TypeAdapter[Any],
    *,
    has_upload: bool,
) -> ReportAnswer:
    """Take a client's report, and keep it as it was signed."""
    body = await read_body(request, device.body_sha256)
    work: Work = parse_json(body, adapter)
    signed = _signed_report(request, assignment, body, has_upload=has_upload)
    return await state.reception.report(device.client, assignment, work, signed)


DIRECT: Mapping[tuple[str, str], Handler] = {("POST", "/v1/check-ins"): post_check_in}


def _signed_report(request: Request, assignment: AssignmentId, body: bytes, *, has_upload: bool) -> SignedReport:
    """A report with its signature, as evidence. Raises `Refused` unless the address is spelt as auditors spell it."""
    target = report_target(assignment, has_upload=has_upload)
    if target_of(request) != target:
        raise Refused("malformed-request", f"a report must be sent to exactly {target.path}, without a query")
    claims = claims_of(request)
    return SignedReport(body.decode(), claims.created, claims.nonce, claims.signature)
