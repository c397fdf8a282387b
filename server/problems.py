"""Every error as a problem document (RFC 9457): one table from a kind to its status and title.

`docs/reference/wire.md`, section Problems, is the contract; a test compares the two. Code that refuses a request
raises `Refused` with a kind of the table and one sentence that says what to do. The `ProtocolViolation`s of
`aggregation` carry their own kind. Any other error is the coordinator's fault: it is logged, and answered
`internal-error` without details.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from email.utils import formatdate

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from umbel.aggregation.errors import ProtocolViolation, StaleSignature
from umbel.aggregation.messages import Problem
from umbel.aggregation.plans.tensors import TensorRules
from umbel.server import journal
from umbel.server.blobs.blobs import BlobsUnavailable
from umbel.server.store.outage import DatabaseAway

_log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"
_STORAGE_RETRY_S = 5
_DATABASE_RETRY_S = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """The HTTP status and title of one kind of problem."""

    status: int
    title: str


KINDS: Mapping[str, Kind] = {
    "malformed-signature": Kind(401, "The request's signature headers are missing or malformed"),
    "bad-signature": Kind(401, "The signature does not match"),
    "stale-signature": Kind(401, "The signature's time is too far from the coordinator's clock"),
    "replayed-nonce": Kind(401, "This signed request was already received"),
    "client-removed": Kind(403, "The operator has removed this client"),
    "unbound-name": Kind(403, "The run needs this client's name, but its token does not bind it"),
    "not-a-member": Kind(403, "This client, with its key, is not on the run's member list"),
    "unknown-token": Kind(401, "No such enrolment token"),
    "expired-token": Kind(401, "The enrolment token has expired"),
    "token-used": Kind(409, "The enrolment token was already used"),
    "token-mismatch": Kind(409, "The enrolment token binds another name or label"),
    "name-taken": Kind(409, "The name is taken or reserved"),
    "key-taken": Kind(409, "The key is already enrolled under another name"),
    "admin-key-refused": Kind(401, "The admin key is missing or wrong"),
    "unknown-run": Kind(404, "No such run"),
    "unknown-assignment": Kind(404, "No such assignment"),
    "unknown-model": Kind(404, "No such model"),
    "unknown-upload": Kind(404, "No such upload"),
    "run-exists": Kind(409, "A run of this name already exists"),
    "first-model-in-use": Kind(409, "Another secure run trains this first model"),
    "run-over": Kind(409, "The run is over"),
    "unknown-version": Kind(404, "No such model version"),
    "version-deleted": Kind(410, "The model version was deleted"),
    "malformed-http": Kind(400, "The request is not valid HTTP/1.1"),
    "malformed-request": Kind(422, "The request does not parse"),
    "body-too-large": Kind(413, "The body is too large"),
    "length-required": Kind(411, "The body has no declared length"),
    "wrong-digest": Kind(422, "The body does not match its digest"),
    "mismatching-upload-offset": Kind(409, "The chunk does not start at the upload's offset"),
    "short-chunk": Kind(422, "The chunk is too short"),
    "too-many-chunks": Kind(503, "Too many chunks are being uploaded"),
    "upload-complete": Kind(409, "An update was already completed"),
    "upload-incomplete": Kind(409, "The update is not complete yet"),
    "malformed-update": Kind(422, "The update is malformed"),
    "lying-length": Kind(422, "A declared length is wrong"),
    "wrong-layout": Kind(422, "The layout differs from the model's"),
    "wrong-codec": Kind(422, "The codec differs from the assignment's"),
    "non-finite-update": Kind(422, "The update contains a NaN or an infinity"),
    "update-out-of-range": Kind(422, "The update exceeds the run's bounds"),
    "report-refused": Kind(422, "The report is refused"),
    "assignment-closed": Kind(409, "The assignment is closed"),
    "changed-message": Kind(409, "A different message was sent before"),
    "sample-count-needed": Kind(409, "The run needs a sample count"),
    "range-not-satisfiable": Kind(416, "The range is outside the file"),
    "not-found": Kind(404, "No such address"),
    "method-not-allowed": Kind(405, "This address does not support this method"),
    "shutting-down": Kind(503, "The coordinator is shutting down"),
    "storage-unavailable": Kind(503, "The store of models and updates does not answer"),
    "database-unavailable": Kind(503, "The database does not answer"),
    "internal-error": Kind(500, "The coordinator failed"),
}


class Refused(Exception):
    """A request is refused. `kind`: of the table; `detail`: one sentence that says what to do.

    `tensors`: the run's rules, for a client that must apply them and come again. `is_handshake`: whether every client
    begins like this and the answer says what to send instead, so that nobody need act.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        headers: Mapping[str, str] | None = None,
        tensors: TensorRules | None = None,
        is_handshake: bool = False,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})
        self.tensors = tensors
        self.is_handshake = is_handshake
        assert kind in KINDS, kind


def client_removed() -> Refused:
    """The refusal of a removed client, whose signature was verified."""
    detail = "the coordinator's operator has removed this client; ask for a new token, and enrol under a new name"
    return Refused("client-removed", detail)


def shutting_down() -> Refused:
    """The refusal of a request while this process stops."""
    return Refused("shutting-down", "this coordinator is shutting down; retry soon", {"Retry-After": "1"})


def problem_response(
    kind: str, detail: str, headers: Mapping[str, str] | None = None, tensors: TensorRules | None = None
) -> JSONResponse:
    """The problem document of one kind. `tensors`: a member that only some documents have."""
    known = KINDS[kind]
    body = asdict(Problem(f"urn:umbel:problem:{kind}", known.title, known.status, detail, tensors))
    if tensors is None:
        del body["tensors"]
    return JSONResponse(body, known.status, headers=headers, media_type=MEDIA_TYPE)


def refusal(
    scope: Scope,
    kind: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    tensors: TensorRules | None = None,
) -> JSONResponse:
    """`problem_response`, and a line in the log."""
    journal.refused(scope, kind, detail)
    return problem_response(kind, detail, headers, tensors)


def first_error(error: ValidationError | RequestValidationError) -> str:
    """Name the first field that pydantic found wrong, and why, without the input itself."""
    finding = error.errors()[0]
    where = ".".join(str(part) for part in finding["loc"])
    what = str(finding["msg"]).removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def install(app: FastAPI) -> None:
    """Answer every error of this application with a problem document."""
    for kind in (
        Refused,
        ProtocolViolation,
        RequestValidationError,
        HTTPException,
        ClientDisconnect,
        BlobsUnavailable,
        DatabaseAway,
        Exception,
    ):
        app.add_exception_handler(kind, answer_to)


async def answer_to(request: Request, error: Exception) -> Response:
    """The answer to a request that failed with this error."""
    where = f"{request.method} {request.url.path}"
    match error:
        case Refused(is_handshake=True):
            journal.asked_again(request.scope, error.kind, error.detail)
            return problem_response(error.kind, error.detail, error.headers, error.tensors)
        case Refused():
            return refusal(request.scope, error.kind, error.detail, error.headers, error.tensors)
        case ProtocolViolation():
            headers = {"Date": formatdate(usegmt=True)} if isinstance(error, StaleSignature) else None
            return refusal(request.scope, error.kind, str(error), headers)
        case ClientDisconnect():  # in the middle of its body; nobody reads this answer
            return refusal(
                request.scope,
                "malformed-request",
                "the connection ended before the whole body arrived; send the request again",
            )
        case RequestValidationError():
            return refusal(request.scope, "malformed-request", first_error(error))
        case HTTPException() if error.status_code < 500:
            return _refused_by_the_router(request, error)
        case BlobsUnavailable():
            _log.error("%s failed, because the store of models and updates does not answer: %s", where, error)
            detail = "the coordinator's store of models and updates does not answer; try again later"
            return problem_response("storage-unavailable", detail, {"Retry-After": str(_STORAGE_RETRY_S)})
        case DatabaseAway():  # logged once, by the database
            detail = "the coordinator's database does not answer; try again later"
            return problem_response("database-unavailable", detail, {"Retry-After": str(_DATABASE_RETRY_S)})
        case _:
            if not isinstance(error, HTTPException):
                _log.error("unexpected error in %s", where, exc_info=error)
            return problem_response(
                "internal-error", "the coordinator failed because of an internal error; its log has the details"
            )


def _refused_by_the_router(request: Request, error: HTTPException) -> Response:
    match error.status_code:
        case 405:
            detail = f"{request.url.path} does not support {request.method}; /v1/openapi.json lists the methods"
            return refusal(request.scope, "method-not-allowed", detail, error.headers)
        case 404:
            return refusal(request.scope, "not-found", "there is no such address; /v1/openapi.json lists all addresses")
        case _:
            return refusal(request.scope, "malformed-request", error.detail, error.headers)
