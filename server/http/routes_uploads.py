"""Routes for resumable uploads of updates: they translate header fields for `runs/uploads.py`."""

import re

from fastapi import APIRouter, Request, Response

from umbel.aggregation.errors import MalformedSignature
from umbel.aggregation.trust.signatures import parse_digest
from umbel.aggregation.types import AssignmentId
from umbel.server.http.auth import VerifiedDevice, checked_pieces
from umbel.server.http.deps import (
    SIGNED,
    DeviceDep,
    State,
    StateDep,
    binary_body,
    header_field,
    problems,
    require_no_body,
)
from umbel.server.problems import Refused
from umbel.server.runs.uploads import Incoming
from umbel.server.store.stored import StoredUpload

router = APIRouter(prefix="/v1/assignments/{assignment}/update", tags=["uploads"])
PARTIAL_UPLOAD = "application/partial-upload"
_NUMBER = re.compile(r"[0-9]{1,15}")
_UPDATE = ("malformed-update", "wrong-layout", "wrong-codec", "non-finite-update", "update-out-of-range")
_RESPONSES = problems(
    *SIGNED,
    *_UPDATE,
    "unknown-assignment",
    "unknown-upload",
    "mismatching-upload-offset",
    "short-chunk",
    "too-many-chunks",
    "upload-complete",
    "assignment-closed",
    "report-refused",
)

_IS_LAST = header_field("Upload-Complete", r"^\?[01]$")
_BEGIN = {
    "parameters": [
        header_field("Upload-Length", r"^[0-9]{1,15}$"),
        header_field("Repr-Digest", r"^sha-256=:[A-Za-z0-9+/]{43}=:$"),
        _IS_LAST,
    ],
    **binary_body("application/octet-stream"),
}
_APPEND = {
    "parameters": [header_field("Upload-Offset", r"^[0-9]{1,15}$"), _IS_LAST],
    **binary_body(PARTIAL_UPLOAD),
}


@router.post("", status_code=201, response_class=Response, responses=_RESPONSES, openapi_extra=_BEGIN)
async def post_update(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> Response:
    """Begin an upload, with the whole update or with its first chunk."""
    length, sha256 = _number(request, "Upload-Length"), _repr_digest(request)
    chunk = _chunk(request, device, state, offset=0)
    upload = await state.uploads.begin(device.client, AssignmentId(assignment), length, sha256, chunk)
    return Response(status_code=201, headers={"Location": request.url.path, **_progress(upload)})


@router.head("", status_code=204, responses=_RESPONSES)
async def head_update(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> Response:
    """How many bytes of the upload have arrived."""
    await require_no_body(request, device)
    upload = await state.uploads.look(device.client, AssignmentId(assignment))
    headers = {"Upload-Length": str(upload.length), "Cache-Control": "no-store", **_progress(upload)}
    return Response(status_code=204, headers=headers)


@router.patch("", status_code=204, responses=_RESPONSES, openapi_extra=_APPEND)
async def patch_update(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> Response:
    """Append the next chunk."""
    if request.headers.get("content-type") != PARTIAL_UPLOAD:
        raise Refused("malformed-request", f"a chunk's Content-Type must be {PARTIAL_UPLOAD}")
    chunk = _chunk(request, device, state, offset=_number(request, "Upload-Offset"))
    upload = await state.uploads.append(device.client, AssignmentId(assignment), chunk)
    return Response(status_code=204, headers=_progress(upload))


@router.delete("", status_code=204, responses=_RESPONSES)
async def delete_update(request: Request, device: DeviceDep, state: StateDep, assignment: str) -> Response:
    """Forget the upload."""
    await require_no_body(request, device)
    await state.uploads.forget(device.client, AssignmentId(assignment))
    return Response(status_code=204)


def _chunk(request: Request, device: VerifiedDevice, state: State, offset: int) -> Incoming:
    """A chunk whose body is read later. Each piece of it is a sign of life of the client."""
    is_last = request.headers.get("upload-complete")
    if is_last not in ("?0", "?1"):
        raise Refused("malformed-request", "Upload-Complete must be ?1 for the last chunk, and ?0 for all others")
    n_bytes = int(request.headers.get("content-length", "0"))  # `limits.py` checks it
    pieces = checked_pieces(request, device.body_sha256, lambda: state.services.heard.note(device.client))
    return Incoming(offset, is_last == "?1", n_bytes, pieces)


def _number(request: Request, name: str) -> int:
    text = request.headers.get(name, "")
    if not _NUMBER.fullmatch(text):
        raise Refused("malformed-request", f"{name} must be a number of bytes of 1 to 15 digits, not {text[:40]!r}")
    return int(text)


def _repr_digest(request: Request) -> str:
    try:
        return parse_digest(request.headers.get("repr-digest", "")).hex()
    except MalformedSignature as error:
        raise Refused("malformed-request", f"Repr-Digest: {error}") from error


def _progress(upload: StoredUpload) -> dict[str, str]:
    return {"Upload-Offset": str(upload.offset), "Upload-Complete": "?1" if upload.is_complete else "?0"}
