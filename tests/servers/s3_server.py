"""An S3 server for tests: moto's, as a process of its own over HTTP, and a wire to it that can be cut.

moto takes any signature and never lets a link expire, so in front of it stands what a real store would refuse.
"""

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
from pydantic import SecretStr

from tests.repository import ROOT
from tests.servers.ports import own_port
from tests.servers.waits import wait_until
from umbel.server.settings import Settings

ACCESS_KEY = "umbel-test"
SECRET_KEY = "not a secret: 5f0c"
_Start = Callable[..., Any]


class Strict:
    """WSGI middleware: refuses other access keys, expired links, and requests that carry a client's signature."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: _Start) -> Iterable[bytes]:
        refusal = self._refusal(environ)
        if refusal is None:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{refusal}</Code></Error>".encode()]

    def _refusal(self, environ: dict[str, Any]) -> str | None:
        if environ["PATH_INFO"].startswith("/moto-api"):
            return None
        if "HTTP_SIGNATURE" in environ or "HTTP_SIGNATURE_INPUT" in environ:
            return "LeakedSignature"
        query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"]).items()}
        who = query.get("X-Amz-Credential") or environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2]
        if who.partition("/")[0] != ACCESS_KEY:
            return "InvalidAccessKeyId"
        if "X-Amz-Date" in query:
            made = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            if datetime.now(UTC) > made + timedelta(seconds=int(query["X-Amz-Expires"])):
                return "AccessDenied"
        return None


ANSWER_S = 60.0  # for an answer on a busy machine; httpx gives up after five seconds by itself


@dataclass
class S3Server:
    """A server process and the port that leads to it."""

    url: str
    process: "subprocess.Popen[bytes]"

    def make_bucket(self) -> str:
        """A new bucket's name."""
        name = f"umbel-{secrets.token_hex(4)}"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"}
        httpx.put(f"{self.url}/{name}", headers=headers, timeout=ANSWER_S).raise_for_status()
        return name


@contextmanager
def s3_server(port: int = 0) -> Generator[S3Server]:
    """A server with no bucket. What it holds is in its memory, and gone with it."""
    port = port or own_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers.s3_server", str(port)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    server = S3Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait_for(server)
        yield server
    finally:
        process.kill()
        process.wait()


def bucket_fields(server: S3Server, **changed: Any) -> dict[str, Any]:
    """The settings of a coordinator whose blobs are in a new bucket of this server."""
    fields: dict[str, Any] = {
        "blobs": f"s3://{server.make_bucket()}/a/prefix",
        "s3_endpoint": server.url,
        "s3_access_key_id": ACCESS_KEY,
        "s3_secret_access_key": SecretStr(SECRET_KEY),
        "s3_allow_http": True,
    }
    return fields | changed


def bucket_settings(server: S3Server, data: Path, **changed: Any) -> Settings:
    return Settings(data=data, **bucket_fields(server, **changed))


def _wait_for(server: S3Server) -> None:
    def answers() -> bool:
        assert server.process.poll() is None, "the S3 server did not start"
        with suppress(httpx.TransportError):
            httpx.get(f"{server.url}/moto-api/")
            return True
        return False

    wait_until("an answer of the S3 server", answers)


class Wire:
    """A TCP wire to a server that can be down: then connections are cut and refused, as if the server had died."""

    def __init__(self, target_url: str) -> None:
        self._target_port = httpx.URL(target_url).port
        self._open: set[socket.socket] = set()
        self._books = threading.Lock()
        self._is_down = False
        self._left: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def go_down(self) -> None:
        with self._books:
            self._is_down, self._left = True, None
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def go_down_after(self, n_bytes: int) -> None:
        """Go down when so many more bytes have passed, both ways together."""
        self._left = n_bytes

    @property
    def is_down(self) -> bool:
        return self._is_down

    def come_back(self) -> None:
        self._is_down = False

    def close(self) -> None:
        self.go_down()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._is_down:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target_port or 80))
                with self._books:
                    self._open |= {near, far}
                ends = [
                    threading.Thread(target=self._carry, args=way, daemon=True) for way in ((near, far), (far, near))
                ]
                threading.Thread(target=self._connect, args=(ends, near, far), daemon=True).start()

    def _connect(self, ways: list[threading.Thread], near: socket.socket, far: socket.socket) -> None:
        for way in ways:
            way.start()
        for way in ways:
            way.join()
        with self._books:
            self._open -= {near, far}
        near.close()
        far.close()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                self._count(len(data))
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, n_bytes: int) -> None:
        if self._left is not None:
            self._left -= n_bytes
            if self._left <= 0:
                self.go_down()


def main() -> None:
    """Serve on the port that is named, for this machine only."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    port = int(sys.argv[1])
    os.environ["MOTO_PORT"] = str(port)
    run_simple("127.0.0.1", port, Strict(DomainDispatcherApplication(create_backend_app)), threaded=True)


if __name__ == "__main__":
    main()
