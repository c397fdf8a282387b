"""Shapes of HTTP by which requests are smuggled, or servers held up, said to a real coordinator over real sockets.

Each is refused or answered, at once, once, and never with 5xx; what follows it on the connection is nobody's request;
and an honest client is served next.
"""

import re
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from tests.servers.waits import LIMIT_S, wait_for_file

pytestmark = pytest.mark.slow
SILENCE_S = 0.3
HOST = b"Host: umbel\r\n"
POST = b"POST /v1/enrolments HTTP/1.1\r\n" + HOST
GET = b"GET /v1/health HTTP/1.1\r\n" + HOST
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\n" + HOST + b"\r\n"

REFUSED: dict[str, bytes] = {
    "a length and a transfer coding": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a transfer coding and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 0\r\n\r\n",
    "two equal lengths": POST + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n",
    "two lengths in a list": POST + b"Content-Length: 0, 5\r\n\r\n",
    "a length with a sign": POST + b"Content-Length: +0\r\n\r\n",
    "a length below nothing": POST + b"Content-Length: -1\r\n\r\n",
    "a length in hexadecimal": POST + b"Content-Length: 0x0\r\n\r\n",
    "a length with a gap": POST + b"Content-Length: 0 0\r\n\r\n",
    "an empty length": POST + b"Content-Length: \r\n\r\n",
    "a length beyond 64 bits": POST + b"Content-Length: 18446744073709551616\r\n\r\n",
    "a length in digits of no ASCII": POST + b"Content-Length: \xb2\r\n\r\n",
    "chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks with extensions": POST + b'Transfer-Encoding: chunked\r\n\r\n0;a="\r\n\r\n',
    "chunks of a size that wraps": POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff0\r\n\r\n",
    "chunks in capitals": POST + b"Transfer-Encoding: CHUNKED\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "a coding before chunks": POST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "a coding that nobody knows": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a tab before a coding": POST + b"Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n",
    "a folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a folded field": GET + b"A: b\r\n c\r\n\r\n",
    "a fold before all fields": b"GET /v1/health HTTP/1.1\r\n " + HOST + b"\r\n",
    "a space before a colon": GET + b"Content-Length : 5\r\n\r\n",
    "a space in a name": GET + b"Content Length: 5\r\n\r\n",
    "a field without a colon": GET + b"Content-Length\r\n\r\n",
    "a field without a name": GET + b": 5\r\n\r\n",
    "a NUL in a value": GET + b"A: \x00\r\n\r\n",
    "a NUL in a name": GET + b"A\x00: b\r\n\r\n",
    "a bare carriage return": GET + b"A: b\rContent-Length: 5\r\n\r\n",
    "bare line feeds": b"GET /v1/health HTTP/1.1\nHost: umbel\n\n",
    "a bare line feed after a field": GET + b"A: b\nContent-Length: 5\r\n\r\n",
    "no host": b"GET /v1/health HTTP/1.1\r\n\r\n",
    "two hosts": GET + HOST + b"\r\n",
    "no version": b"GET /v1/health\r\n" + HOST + b"\r\n",
    "a version that is none": b"GET /v1/health HTTP/9.9\r\n" + HOST + b"\r\n",
    "HTTP/2 from the start": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "a method in lower case": b"get /v1/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a method that is none": b"G\x00T /v1/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a space in the target": b"GET /v1/health x HTTP/1.1\r\n" + HOST + b"\r\n",
    "a byte beyond ASCII in the target": b"GET /v1/h\xe4lth HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target without a slash": b"GET v1/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target of 1 MB": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a method of 1 MB": b"G" * 1_000_000 + b" / HTTP/1.1\r\n" + HOST + b"\r\n",
    "a field of 1 MB": GET + b"A: " + b"b" * 1_000_000 + b"\r\n\r\n",
    "a name of 1 MB": GET + b"A" * 1_000_000 + b": b\r\n\r\n",
    "100,000 fields": GET + b"A: b\r\n" * 100_000 + b"\r\n",
}
ANSWERED: dict[str, tuple[bytes, set[int]]] = {
    "a whole address": (b"GET http://elsewhere/v1/health HTTP/1.1\r\n" + HOST + b"\r\n", {200, 400, 404}),
    "another scheme": (b"GET file:///etc/passwd HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404}),
    "an authority": (b"CONNECT elsewhere:443 HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404, 405}),
    "an asterisk": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404, 405}),
    "a fragment": (b"GET /v1/health#x HTTP/1.1\r\n" + HOST + b"\r\n", {200, 400, 404}),
    "dots": (b"GET /v1/../../admin.key HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404}),
    "half an escape": (b"GET /v1/health% HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404}),
    "escapes of no text": (b"GET /v1/%ff%fe%00%0d%0a HTTP/1.1\r\n" + HOST + b"\r\n", {404, 422}),
    "HTTP/1.0": (b"GET /v1/health HTTP/1.0\r\n\r\n", {200}),
    "a WebSocket": (
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        {200, 400, 404, 426},
    ),
    "HTTP/2 by upgrade": (GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", {200, 400, 426}),
    "a body that was not asked for": (GET + b"Content-Length: 5\r\n\r\nhello", {200}),
    "an expectation": (POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n", {401, 417}),
    "an expectation that nobody meets": (GET + b"Expect: miracles\r\n\r\n", {200, 417}),
    "a trailer that is announced": (GET + b"Trailer: A\r\nTE: trailers\r\n\r\n", {200}),
    "a method that HTTP lacks": (b"BREW /v1/health HTTP/1.1\r\n" + HOST + b"\r\n", {400, 405, 501}),
    "a host that is none": (b"GET /v1/nowhere HTTP/1.1\r\nHost: [::1\r\n\r\n", {400, 404}),
    "a host in capitals and a port": (b"GET /v1/health HTTP/1.1\r\nHost: UMBEL:99999999\r\n\r\n", {200, 400}),
    "empty lines before it": (b"\r\n\r\n" + GET + b"\r\n", {200, 400}),
}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Generator[int]:
    data = tmp_path_factory.mktemp("served")
    command = [sys.executable, "-m", "umbel", "serve", "--data", str(data), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield _port(data / "endpoint", process)
        finally:
            process.terminate()


def _port(endpoint: Path, process: "subprocess.Popen[bytes]") -> int:
    return int(wait_for_file(endpoint, process).read_text().rsplit(":", 1)[1])


@pytest.mark.parametrize("shape", REFUSED)
def test_what_could_smuggle_a_request_is_refused_and_hung_up_on(shape: str, port: int) -> None:
    statuses, is_closed = said(port, REFUSED[shape] + SMUGGLED, n_answers=2)
    assert all(400 <= status < 500 for status in statuses), statuses
    assert len(statuses) <= 1, "one answer: the rest is no request"
    assert is_closed, "what comes after cannot be told apart"
    require_served(port)


@pytest.mark.parametrize("shape", ANSWERED)
def test_what_is_odd_is_answered(shape: str, port: int) -> None:
    request, expected = ANSWERED[shape]
    statuses, _ = said(port, request)
    assert len(statuses) == 1
    assert statuses[0] in expected
    require_served(port)


def test_requests_that_come_at_once_are_answered_in_order(port: int) -> None:
    other = GET.replace(b"health", b"nowhere")
    statuses, _ = said(port, (GET + b"\r\n" + other + b"\r\n") * 10, n_answers=20)
    assert statuses == [200, 404] * 10


def test_a_request_behind_a_body_that_is_refused_is_none(port: int) -> None:
    statuses, is_closed = said(port, POST + b"Content-Length: 99999999\r\n\r\n" + SMUGGLED, n_answers=2)
    assert (statuses, is_closed) == ([413], True)


def test_a_request_behind_a_body_is_the_next_one(port: int) -> None:
    """The signature is refused before the body is read; the body is still that request's."""
    statuses, _ = said(port, POST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED + GET + b"\r\n")
    assert statuses in ([401, 200], [401])


def said(port: int, request: bytes, n_answers: int = 1) -> tuple[list[int], bool]:
    """The statuses that come back, and whether the connection was closed.

    That, or so many answers, is awaited; then it is listened for a moment whether more comes.
    """
    with closing(socket.create_connection(("127.0.0.1", port), LIMIT_S)) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may be refused before it has all come
            connection.sendall(request)
        return _heard(connection, n_answers)


def _heard(connection: socket.socket, n_answers: int) -> tuple[list[int], bool]:
    heard, statuses = b"", list[int]()
    while True:
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            assert len(statuses) >= n_answers, f"neither {n_answers} answers nor an end, but {statuses}"
            return statuses, False
        except ConnectionResetError:
            return statuses, True
        if not piece:
            return statuses, True
        heard += piece
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", heard)]
        if len(statuses) >= n_answers:
            connection.settimeout(SILENCE_S)


def require_served(port: int) -> None:
    assert httpx.get(f"http://127.0.0.1:{port}/v1/health", timeout=LIMIT_S).status_code == 200
