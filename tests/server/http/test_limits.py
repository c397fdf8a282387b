"""How long a request's body may be: by the length that it declares, then by what really comes."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from umbel.server.http.limits import (
    REPORT_BYTES_MAX,
    RUN_BYTES_MAX,
    SECURE_BYTES_MAX,
    BodyLimits,
    Cap,
    cap_at,
    caps_of,
)
from umbel.server.problems import Refused
from umbel.server.serve.app import CoordinatorAPI
from umbel.server.settings import Settings

Message = MutableMapping[str, Any]
CAPS = (Cap(re.compile("/large"), 100), Cap(re.compile(".*"), 10))


class Endpoint:
    """Reads the whole body."""

    def __init__(self) -> None:
        self.body: bytes | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.body = body


def ask(
    pieces: Sequence[bytes],
    headers: Mapping[str, str],
    path: str = "/any",
    kind: str = "http",
    *,
    says_more: bool = True,
) -> tuple[bytes | None, int | None]:
    """What the endpoint has read, and the status with which the request was refused before it.

    A refused request's body stays unread. So its connection must be closed, or the body would be read as a request.
    """
    scope = {"type": kind, "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    waiting: list[Message] = [{"type": "http.request", "body": piece} for piece in pieces]
    if says_more:
        waiting = [{**message, "more_body": message is not waiting[-1]} for message in waiting]
    sent, endpoint = list[Message](), Endpoint()

    async def receive() -> Message:
        return waiting.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(BodyLimits(endpoint, CAPS)({**scope, "method": "POST", "query_string": b""}, receive, send))
    if sent:
        assert (b"connection", b"close") in sent[0]["headers"]
    return endpoint.body, sent[0]["status"] if sent else None


@pytest.mark.parametrize("pieces", [[b"x" * 10], [b"x" * 4, b"x" * 6], [b"x" * 10, b""]])
def test_a_body_of_the_length_that_it_declares_passes_up_to_the_cap(pieces: Sequence[bytes]) -> None:
    assert ask(pieces, {"content-length": "10"}) == (b"x" * 10, None)


def test_a_body_that_declares_more_than_the_cap_is_refused_unread() -> None:
    assert ask([b"x" * 11], {"content-length": "11"}) == (None, 413)
    assert ask([b"x" * 11], {"content-length": "11"}, "/large") == (b"x" * 11, None)


@pytest.mark.parametrize(
    ("pieces", "declared"),
    [([b"xxxx"], "3"), ([b"xx"], "3"), ([b"xx", b"xx"], "3"), ([b"x", b"x"], "3"), ([b"x"], "0"), ([b"x"], None)],
)
def test_a_body_of_another_length_than_it_declares_is_refused(pieces: Sequence[bytes], declared: str | None) -> None:
    with pytest.raises(Refused, match="bytes, but"):
        ask(pieces, {} if declared is None else {"content-length": declared})


def test_a_message_that_does_not_say_whether_more_comes_is_the_last() -> None:
    """So ASGI has it."""
    with pytest.raises(Refused, match="says 3 bytes, but 2 bytes arrived"):
        ask([b"xx"], {"content-length": "3"}, says_more=False)
    assert ask([b"xxx"], {"content-length": "3"}, says_more=False) == (b"xxx", None)


def test_a_request_without_a_body_needs_no_length() -> None:
    assert ask([b""], {}) == (b"", None)


@pytest.mark.parametrize("length", ["-1", "1.0", "0x1", "1 ", "", "9" * 16])
def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    assert ask([b"x"], {"content-length": length}) == (None, 422)


def test_a_chunked_body_is_refused_with_the_ask_for_a_length() -> None:
    assert ask([b"x"], {"transfer-encoding": "chunked"}) == (None, 411)


def test_an_address_with_a_nul_is_refused() -> None:
    assert ask([b""], {}, "/a\x00b") == (None, 422)


def test_what_is_no_request_passes() -> None:
    """The server's own start and stop are messages, too."""
    assert ask([b"x" * 99], {}, kind="lifespan") == (b"x" * 99, None)


def test_a_server_that_starts_and_stops_is_heard_past_the_direct_routes() -> None:
    """Its messages have neither method nor path."""
    heard, sent = list[str](), list[str]()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        heard.append("started")
        yield
        heard.append("stopped")

    app = CoordinatorAPI(lifespan=lifespan)
    app.add_direct_routes({}, [])
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Message:
        return dict(messages.pop(0))

    async def send(message: Message) -> None:
        sent.append(message["type"])

    asyncio.run(app({"type": "lifespan", "state": {}}, receive, send))
    assert (heard, sent) == (["started", "stopped"], ["lifespan.startup.complete", "lifespan.shutdown.complete"])


def test_each_address_has_its_own_cap(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    caps = caps_of(settings)
    found = {
        path: cap_at(path, caps).bytes_max
        for path in (
            "/v1/assignments/a/update",
            "/v1/assignments/a/report",
            "/v1/assignments/a/evaluation",
            "/v1/assignments/a/secure/shares",
            "/v1/admin/models/00",
            "/v1/admin/runs/demo",
            "/v1/admin/runs/demo/stop",
            "/v1/check-ins",
        )
    }
    control = settings.json_bytes_max
    assert list(found.values()) == [
        settings.chunk_bytes_max,
        min(REPORT_BYTES_MAX, control),
        min(REPORT_BYTES_MAX, control),
        SECURE_BYTES_MAX,
        settings.model_bytes_max,
        RUN_BYTES_MAX,
        control,
        control,
    ]
