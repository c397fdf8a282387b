"""Caps on request bodies, as ASGI middleware: the declared length is checked first, then the bytes that come.

A body must declare its length (411), within the cap of its address (413), and have exactly that length.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umbel.aggregation.trust.members import FILE_BYTES_MAX
from umbel.server.problems import Refused, refusal
from umbel.server.settings import Settings

RUN_FILE_BYTES_MAX = 16 << 10  # reading TOML takes time with the square of its length
RUN_BYTES_MAX = 2 * (RUN_FILE_BYTES_MAX + FILE_BYTES_MAX)  # with its member list, in JSON, where \n is two bytes
REPORT_BYTES_MAX = 16 << 10  # the audit bundle keeps it as it was signed
SECURE_BYTES_MAX = 64 << 10  # shares for three hundred neighbours are 34 KB
_LENGTH = re.compile(r"\d{1,15}")


@dataclass(frozen=True, slots=True)
class Cap:
    """At addresses that match `path`, a body holds at most `bytes_max`."""

    path: re.Pattern[str]
    bytes_max: int


def caps_of(settings: Settings) -> tuple[Cap, ...]:
    """The caps in order: the first whose path matches applies. The last is for control messages."""
    return (
        Cap(re.compile(r"/v1/assignments/[^/]+/update"), settings.chunk_bytes_max),
        Cap(re.compile(r"/v1/assignments/[^/]+/(?:report|evaluation)"), min(REPORT_BYTES_MAX, settings.json_bytes_max)),
        Cap(re.compile(r"/v1/assignments/[^/]+/secure/[^/]+"), SECURE_BYTES_MAX),
        Cap(re.compile(r"/v1/admin/models/[^/]+"), settings.model_bytes_max),
        Cap(re.compile(r"/v1/admin/runs/[^/]+"), RUN_BYTES_MAX),
        Cap(re.compile(r".*", re.DOTALL), settings.json_bytes_max),
    )


def cap_at(path: str, caps: Sequence[Cap]) -> Cap:
    """The cap that applies to a path."""
    return next((cap for cap in caps[:-1] if cap.path.fullmatch(path)), caps[-1])  # the last is for all the rest


class BodyLimits:
    """The middleware. It raises refusals of a body where the body is read, and they are answered there."""

    def __init__(self, app: ASGIApp, caps: Sequence[Cap]) -> None:
        self._app = app
        self._caps = caps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            declared = self._declared(scope)
        except Refused as refused:
            # The body stays unread, so the connection cannot be used again.
            response = refusal(scope, refused.kind, refused.detail, {"Connection": "close"})
            await response(scope, receive, send)
            return
        await self._app(scope, _counted(receive, declared), send)

    def _declared(self, scope: Scope) -> int:
        if "\x00" in scope["path"]:  # PostgreSQL raises an error for it
            raise Refused("malformed-request", "the address contains a NUL character")
        text = "0"
        for name, value in scope["headers"]:
            if name == b"transfer-encoding":
                raise Refused("length-required", "the body was sent chunked; send it with Content-Length")
            if name == b"content-length":
                text = value.decode("latin-1")
        if not _LENGTH.fullmatch(text):
            raise Refused("malformed-request", "Content-Length is not a number of bytes")
        cap = cap_at(scope["path"], self._caps)
        if int(text) > cap.bytes_max:
            raise Refused(
                "body-too-large", f"the body has {int(text)} bytes; this address accepts at most {cap.bytes_max}"
            )
        return int(text)


def _counted(receive: Receive, declared: int) -> Receive:
    """`receive`, but a body longer or shorter than declared is refused."""
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] != "http.request":
            return message
        received += len(message.get("body", b""))
        if received > declared or (received < declared and not message.get("more_body", False)):
            raise Refused("lying-length", f"Content-Length says {declared} bytes, but {received} bytes arrived")
        return message

    return counted
