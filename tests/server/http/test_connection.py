"""Real sockets that end nothing they begin: a peer that owes something has a deadline, one that waits has none."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tests.federations.server_device import Device, House, problem, run_file, small_state
from tests.servers.waits import LIMIT_S, until
from umbel.server.http import connection
from umbel.server.http.connection import Connection
from umbel.server.http.limits import Closable, ConnectionSlots
from umbel.server.serve.app import create_app
from umbel.server.settings import Settings

HEAD = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/enrolments HTTP/1.1\r\nHost: x\r\n"


@asynccontextmanager
async def listening(data: Path, slots: ConnectionSlots | None = None) -> AsyncGenerator[tuple[House, int]]:
    """A coordinator on a real port of this process."""
    settings = Settings(data=data)
    app = create_app(settings)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=partial(Connection, slots=slots or ConnectionSlots(100)),  # type: ignore[arg-type]  # called as the class would be
            log_config=None,
        )
    )
    serving = asyncio.create_task(server.serve())
    await until("a server that listens", lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as http:
            yield House(http, settings, app), port
    finally:
        server.should_exit = True
        await serving


async def said_until_closed(port: int, *pieces: bytes, every_s: float = 0.0) -> bytes:
    """Send these pieces, `every_s` apart, and return all that comes until the coordinator closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(every_s)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(LIMIT_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        sending.cancel()
        writer.close()


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (HEAD,),
        (HEAD, *[b"A: b\r\n"] * 1000),
        (POST + b"Content-Length: 5000\r\n\r\n",),
        (POST + b"Content-Length: 5000\r\n\r\n", *[b"x"] * 1000),
    ],
    ids=["nothing", "half a head", "a head without end", "no body", "a body byte by byte"],
)
def test_a_peer_that_does_not_go_on_is_hung_up_on(
    pieces: tuple[bytes, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.4)
    monkeypatch.setattr(connection, "PROGRESS_S", 0.4)

    async def scenario() -> None:
        async with listening(tmp_path) as (_, port):
            answer = await said_until_closed(port, *pieces, every_s=0.05)
            assert not answer or b" 401 " in answer.splitlines()[0]  # for what is not signed, before its body has come

    asyncio.run(scenario())


def test_half_a_second_request_has_a_deadline_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (_, port), asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"\r\n")
            assert b"200 OK" in await reader.readline()
            monkeypatch.setattr(connection, "HEAD_S", 0.2)
            writer.write(HEAD)
            with suppress(ConnectionResetError):
                await reader.read()  # until it is hung up on
            writer.close()

    asyncio.run(scenario())


def test_a_peer_that_does_not_read_its_answer_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROGRESS_S", 0.4)

    async def scenario() -> None:
        slots = ConnectionSlots(100)
        async with listening(tmp_path, slots) as (it, port):

            async def much() -> Response:
                return Response(bytes(1 << 25))

            it.app.add_api_route("/v1/much", much)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(HEAD.replace(b"health", b"much") + b"\r\n")
            await until("a connection", lambda: slots._priorities)  # pyright: ignore[reportPrivateUsage]
            await until("its end", lambda: not slots._priorities)  # pyright: ignore[reportPrivateUsage]
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1 << 25)
            writer.close()

    asyncio.run(scenario())


def test_one_that_waits_for_work_is_not_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (it, _):
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            [device] = await it.devices(1)
            monkeypatch.setattr(connection, "HEAD_S", 0.2)
            monkeypatch.setattr(connection, "PROGRESS_S", 0.2)
            answer = await device.check_in(layout, wait_s=1.0)
            assert answer.json()["assignment"] is None

    asyncio.run(scenario())


def test_over_the_cap_the_oldest_stranger_goes_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with listening(tmp_path, ConnectionSlots(3)) as (_, port):
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            honest = []
            for reader, writer in strangers:
                answered, asking = await asyncio.open_connection("127.0.0.1", port)
                asking.write(HEAD + b"\r\n")
                assert b"200 OK" in await answered.readline()
                async with asyncio.timeout(LIMIT_S):
                    with suppress(ConnectionResetError):
                        assert await reader.read() == b""  # its place was taken
                writer.close()
                honest.append(asking)
            for writer in honest:
                writer.close()

    asyncio.run(scenario())
    assert caplog.text.count("connections are taken") == 1


def is_not_read_by(peer: Closable) -> bool:
    """Whether what a peer does not read has filled its connection's buffers."""
    assert isinstance(peer, Connection)
    return peer._write_timer is not None  # pyright: ignore[reportPrivateUsage]


def test_a_stranger_that_does_not_read_its_answers_keeps_nobody_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        slots = ConnectionSlots(3)
        async with listening(tmp_path, slots) as (_, port):
            asked = (HEAD + b"\r\n").replace(b"/v1/health", b"/v1/openapi.json") * 60
            strangers = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(3)]
            for _, writer in strangers:
                writer.write(asked)
            await until("three that do not read", lambda: sum(map(is_not_read_by, slots._priorities)) == 3)  # pyright: ignore[reportPrivateUsage]
            for _ in range(6):
                assert b"200 OK" in await said_until_closed(port, HEAD + b"Connection: close\r\n\r\n")
            for _, writer in strangers:
                writer.transport.abort()

    asyncio.run(scenario())


def test_those_whose_requests_are_held_open_keep_their_places(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path, ConnectionSlots(3)) as (it, port):
            layout = await it.begin(run_file(target=3, minimum=3), small_state())
            devices = await it.devices(3)
            held = [asyncio.create_task(device.check_in(layout, wait_s=20.0)) for device in devices[:2]]
            while not all((device.name, "demo") in it.state.lines._held for device in devices[:2]):
                await it.http.get("/v1/health")
            for _ in range(5):
                assert b"200 OK" in await said_until_closed(port, HEAD + b"Connection: close\r\n\r\n")
            assert not any(task.done() for task in held)
            last = asyncio.create_task(devices[2].check_in(layout, wait_s=20.0))
            assert all([(await task).json()["assignment"] for task in (*held, last)])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\n\r\n",
        HEAD + b"A: " + b"a" * 32_000,
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        POST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    ],
    ids=["bad line", "no host", "big head", "two lengths", "gzip", "bad chunk"],
)
def test_what_is_no_http_gets_a_problem_document(request_bytes: bytes, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (_, port):
            head, _, body = (await said_until_closed(port, request_bytes)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"content-type: application/problem+json" in head
            assert json.loads(body)["type"] == "urn:umbel:problem:malformed-http"

    asyncio.run(scenario())


def test_addresses_are_what_they_are_without_redirects_or_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (it, _):
            for path in ("/v1/health/", "/docs", "/redoc", "/docs/oauth2-redirect"):
                assert problem(await it.http.get(path, headers={"Host": "evil.example"})) == "not-found"
            assert (await it.http.get("/v1/openapi.json")).status_code == 200

    asyncio.run(scenario())


def test_a_client_holds_four_requests_and_the_newest_win(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (it, _):
            layout = await it.begin(run_file(target=3, minimum=3), small_state())
            [device, other] = await it.devices(2)
            elsewhere = asyncio.create_task(other.check_in(layout, wait_s=20.0))
            held: list[asyncio.Task[httpx.Response]] = []
            for _ in range(4):
                held.append(asyncio.create_task(device.check_in(layout, wait_s=20.0)))
                while len(it.state.lines._held.get((device.name, "demo"), ())) < len(held):
                    await it.http.get("/v1/health")
            assert not any(task.done() for task in held)
            newest = asyncio.create_task(device.check_in(layout, wait_s=20.0))
            assert (await held[0]).json()["retry_after_s"] > 0
            assert not any(task.done() for task in (*held[1:], newest, elsewhere))
            third = Device(it.http, "third")
            await third.enrol((await it.tokens(1))[0])
            assert (await third.check_in(layout)).json()["assignment"]
            assert all([(await task).json()["assignment"] for task in (*held[1:], newest, elsewhere)])

    asyncio.run(scenario())


def test_a_header_field_that_comes_twice_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (it, _):
            [device] = await it.devices(1)
            for name in ("Content-Digest", "Signature-Input", "Signature"):
                signed = device.headers("GET", "/v1/models/" + "0" * 64, b"")
                twice = httpx.Headers([*signed.items(), (name, signed[name])])
                answer = await it.http.get("/v1/models/" + "0" * 64, headers=twice)
                assert problem(answer) == "malformed-signature"
                assert "sent twice" in answer.json()["detail"]

    asyncio.run(scenario())


def test_uvicorn_still_has_what_a_connection_uses() -> None:
    """`Connection` builds on names that uvicorn may change: docs/decisions/0018-own-connections.md."""
    overridden = {"connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"}
    overridden |= {name for name in vars(Connection) if name.startswith("on_")}
    overridden |= {"send_400_response", "_unset_keepalive_if_required"}
    assert overridden <= set(dir(HttpToolsProtocol))
    kept = {"cycle", "flow", "headers", "loop", "parser", "pipeline", "timeout_keep_alive_task", "transport"}
    assert kept <= set(HttpToolsProtocol.__init__.__code__.co_names)
    of_a_request = {
        "disconnected",
        "message_event",
        "on_response",
        "response_complete",
        "response_started",
        "transport",
        "waiting_for_100_continue",
    }
    assert of_a_request <= set(RequestResponseCycle.__init__.__code__.co_names)
