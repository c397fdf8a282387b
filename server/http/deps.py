"""Dependencies of the routes: the verified device or operator, parsed bodies, and OpenAPI entries.

FastAPI would read a body before it verifies the sender. So routes read the raw request themselves, and `body_of` writes
their OpenAPI entries.
"""

from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.messages import Problem
from umbel.server.devices.waiting import HeldRequests
from umbel.server.http.auth import VerifiedDevice, read_body, require_admin, verify_device
from umbel.server.http.downloads import LocalCopies
from umbel.server.http.limits import mark_verified
from umbel.server.problems import KINDS, MEDIA_TYPE, Refused, first_error
from umbel.server.runs.coordinator import Coordinator
from umbel.server.runs.open_runs import OpenRunsList
from umbel.server.runs.reception import Reception
from umbel.server.runs.uploads import Uploads
from umbel.server.services import Services
from umbel.server.store.keys import AdminKey

T = TypeVar("T")


class State:
    """What the routes use, in `app.state.umbel`."""

    __slots__ = ("admin_key", "coordinator", "copies", "lines", "open_runs", "reception", "services", "uploads")

    def __init__(self, services: Services, admin_key: AdminKey) -> None:
        self.services = services
        self.admin_key = admin_key
        self.lines = HeldRequests()
        self.copies = LocalCopies(services.blobs)
        self.coordinator = Coordinator(services)
        self.reception = Reception(self.coordinator)
        self.open_runs = OpenRunsList(self.coordinator)
        self.uploads = Uploads(services, self.reception)


def state_in(request: Request) -> State:
    """The state of the application that this request came to."""
    state = request.app.state.umbel
    assert isinstance(state, State)
    return state


async def state_of(request: Request) -> State:
    """`state_in` as a dependency. Asynchronous because FastAPI runs anything else in a thread."""
    return state_in(request)


async def device_of(request: Request, state: Annotated[State, Depends(state_of)]) -> VerifiedDevice:
    """The client that signed a request. Raises `Refused` or a `SignatureRefused`."""
    return await verify_device(request, state.services)


async def _operator(request: Request, state: Annotated[State, Depends(state_of)]) -> None:
    require_admin(state.admin_key, request.headers.get("authorization"))
    request.state.is_operator = True  # for the log, if the request is refused later
    mark_verified(request.scope)


StateDep = Annotated[State, Depends(state_of)]
DeviceDep = Annotated[VerifiedDevice, Depends(device_of)]
Operator = Depends(_operator)


async def read_message(request: Request, sha256: bytes, adapter: TypeAdapter[T]) -> T:
    """A JSON body that hashes to `sha256`. Raises `Refused`, naming the field, for one that does not parse."""
    return parse_json(await read_body(request, sha256), adapter)


async def require_no_body(request: Request, device: VerifiedDevice) -> None:
    """Read a request that should have no body to its end, and check its digest."""
    await read_body(request, device.body_sha256)


def parse_json(body: bytes, adapter: TypeAdapter[T]) -> T:
    """Parse a message strictly: `true` and `"3"` are not numbers. Raises `Refused`."""
    try:
        return adapter.validate_json(body, strict=True)
    except ValidationError as error:
        raise Refused("malformed-request", first_error(error)) from error


def json_answer(adapter: TypeAdapter[T], message: T) -> Response:
    """A message as the answer to a request."""
    return Response(adapter.dump_json(message), media_type="application/json")


def body_of(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """The OpenAPI entry of a JSON body that a route reads itself."""
    content = {"application/json": {"schema": adapter.json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def binary_body(media_type: str) -> dict[str, Any]:
    """The OpenAPI entry of a body that is not JSON."""
    schema = {"type": "string", "format": "binary"}
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def either_body(*entries: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI entry of a body in any of several media types."""
    content = {name: schema for entry in entries for name, schema in entry["requestBody"]["content"].items()}
    return {"requestBody": {"required": True, "content": content}}


def header_field(name: str, pattern: str, is_required: bool = True) -> dict[str, Any]:
    """The OpenAPI entry of a header field that a route reads itself."""
    schema = {"type": "string", "pattern": pattern}
    return {"name": name, "in": "header", "required": is_required, "schema": schema}


def problems(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of the problem documents that a route may answer with."""
    by_status: dict[int, list[str]] = {}
    for kind in ("internal-error", "database-unavailable", *kinds):
        by_status.setdefault(KINDS[kind].status, []).append(kind)
    schema = TypeAdapter(Problem).json_schema()
    return {
        status: {"description": ", ".join(sorted(found)), "content": {MEDIA_TYPE: {"schema": schema}}}
        for status, found in sorted(by_status.items())
    }


ANY = ("malformed-request", "body-too-large", "length-required")  # for the length that a request declares
SIGNED = (
    *ANY,
    "malformed-signature",
    "bad-signature",
    "stale-signature",
    "replayed-nonce",
    "client-removed",
    "wrong-digest",
    "lying-length",
)
ADMIN = (*ANY, "admin-key-refused", "lying-length")
