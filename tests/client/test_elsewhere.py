"""A model that the coordinator keeps elsewhere: followed once, without a signature, never from TLS to plain HTTP."""

import hashlib
import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.client.double import Double, Handler, stream
from tests.client.double_server import served
from umbel.aggregation.types import ModelRef
from umbel.client.coordinator import Coordinator
from umbel.client.elsewhere import elsewhere
from umbel.client.errors import LinkFailed, Redirected
from umbel.client.fetch import Wanted, fetch_model
from umbel.client.identity import Identity
from umbel.client.link import Link
from umbel.client.store import Store
from umbel.client.timing import within
from umbel.client.transport import Patience, Transport, connect

Sent = int | None  # how many bytes of what was asked for are sent before the cut; None: all
SECRET = "X-Amz-Signature=5f0c"


class Bucket:
    """Serves one file. `script`: the status of each request in turn and where it is cut; then all goes well."""

    def __init__(self, data: bytes, *script: tuple[int, Sent]) -> None:
        self.data = data
        self.script = list(script)
        self.requests: list[dict[str, str]] = []

    @contextmanager
    def served(self) -> Generator[str]:
        bucket = self

        class Adapter(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                bucket.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the test says what happened."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Adapter)
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/model?{SECRET}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        fields = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append(fields)
        first = int(fields.get("range", "bytes=0-")[6:-1])
        status, n_bytes = self.script.pop(0) if self.script else (206 if first else 200, None)
        request.send_response(status)
        if status >= 300:
            request.send_header("Location", "/elsewhere/still")
        request.send_header("Content-Length", str(len(self.data) - first))
        request.end_headers()
        request.wfile.write(self.data[first : len(self.data) if n_bytes is None else first + n_bytes])


@pytest.fixture
def double() -> Double:
    return Double(torch.nn.Linear(100, 300))


def sending_to(double: Double, link: str) -> Handler:
    """The double, with its models elsewhere."""

    def handle(request: httpx.Request) -> httpx.Response:
        answer = double.handle(request)
        is_model = request.url.path.startswith("/v1/models/")
        if not is_model or answer.status_code >= 300 or b"direct=true" in request.url.query:
            return answer
        return stream(307, b"", {"Location": link})

    return handle


def fetched(double: Double, handle: Handler, tmp_path: Path) -> bytes:
    key = Ed25519PrivateKey.generate()
    double.keys["ward-7"] = key.public_key().public_bytes_raw()
    data = double.model_bytes
    ref = ModelRef(0, hashlib.sha256(data).hexdigest(), len(data), double.layout.digest)
    with served(handle) as url, connect(url) as replicas:
        coordinator = Coordinator(Transport(replicas, Identity("ward-7", key).authorize))
        patience = Patience(within(20.0), time.monotonic() + 20.0)
        path, link = fetch_model(coordinator, Store(tmp_path, url), Wanted(ref, double.layout), Link(), patience)
    assert link.down is not None
    return path.read_bytes()


def test_a_link_is_followed_without_a_signature(double: Double, tmp_path: Path) -> None:
    bucket = Bucket(double.model_bytes)
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path) == double.model_bytes
    [asked] = bucket.requests
    known = {"host", "accept", "accept-encoding", "connection", "user-agent"}
    assert asked.keys() <= known
    assert double.log.count("GET models") == 1


def test_after_a_cut_a_new_link_is_asked_for_and_the_rest_fetched(double: Double, tmp_path: Path) -> None:
    bucket = Bucket(double.model_bytes, (200, 50_000), (206, 30_000))
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path) == double.model_bytes
    assert [asked.get("range") for asked in bucket.requests] == [None, "bytes=50000-", "bytes=80000-"]
    assert double.log.count("GET models") == 3


@pytest.mark.parametrize("status", [403, 404, 500, 302, 307])
def test_a_link_that_brings_nothing_has_the_coordinator_serve_the_model_itself(
    status: int, double: Double, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(double.model_bytes, (status, 0))
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path) == double.model_bytes
    assert len(bucket.requests) == 1
    assert f"127.0.0.1, where the coordinator keeps its models, answered {status}" in caplog.text
    assert SECRET not in caplog.text


def test_a_bucket_out_of_reach_has_the_coordinator_serve_the_model_itself(double: Double, tmp_path: Path) -> None:
    with Bucket(b"").served() as gone:
        pass
    assert fetched(double, sending_to(double, gone), tmp_path) == double.model_bytes


def test_what_came_before_a_link_failed_is_kept(double: Double, tmp_path: Path) -> None:
    bucket = Bucket(double.model_bytes, (200, 50_000), (403, 0))
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path) == double.model_bytes
    assert len(bucket.requests) == 2
    assert double.log.count("GET models") == 3


@pytest.mark.parametrize("n_more", [-1, 0, 1, 10_000])
def test_another_file_than_the_assignments_is_not_believed_and_not_written_if_it_is_longer_or_shorter(
    n_more: int, double: Double, tmp_path: Path
) -> None:
    bucket, ranges = Bucket(bytes(len(double.model_bytes) + n_more)), list[str]()
    with bucket.served() as link:
        handle = sending_to(double, link)

        def noted(request: httpx.Request) -> httpx.Response:
            ranges.append(request.headers.get("range", ""))
            return handle(request)

        assert fetched(double, noted, tmp_path) == double.model_bytes
    assert len(bucket.requests) == 1
    assert ranges == ["", ""], "how much a link has brought is not the coordinator's business"


def test_a_coordinator_that_is_asked_for_the_model_itself_and_sends_us_elsewhere_is_refused(
    double: Double, tmp_path: Path
) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        is_model = request.url.path.startswith("/v1/models/")
        return stream(307, b"", {"Location": link}) if is_model else double.handle(request)

    with Bucket(b"").served() as link, pytest.raises(Redirected):
        fetched(double, handle, tmp_path)


@pytest.mark.parametrize(
    "location", ["", "/v1/models/x", "ftp://host/x", "file:///etc/passwd", "https://user:word@host/x", "https://", "\t"]
)
def test_what_is_no_address_to_go_to_is_refused(location: str, caplog: pytest.LogCaptureFixture) -> None:
    refuse(redirected(location, False))
    assert "no address" in caplog.text


def test_nobody_is_followed_from_tls_to_plain_http(caplog: pytest.LogCaptureFixture) -> None:
    refuse(redirected("http://h/x", True))
    assert "over http://" in caplog.text


def test_a_link_of_endless_length_is_refused() -> None:
    refuse(redirected("https://h/" + "x" * 9000, False))


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("http://127.0.0.1:{port}/x", "this machine itself"),
        ("http://localhost:{port}/x", "this machine itself"),
        ("http://LOCALHOST:{port}/x", "this machine itself"),
        ("http://[::ffff:127.0.0.1]:{port}/x", "this machine itself"),
        ("http://2130706433:{port}/x", "this machine itself"),  # the C library's own ways to write an address
        ("http://127.1:{port}/x", "this machine itself"),
        ("http://0.0.0.0:{port}/x", "this machine itself"),
        ("http://169.254.169.254/latest/meta-data/", "a cloud's metadata service"),
    ],
)
def test_a_coordinator_elsewhere_cannot_send_us_to_this_machine_or_its_cloud(
    location: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(b"secret")
    with bucket.served() as link:
        refuse(redirected(location.format(port=httpx.URL(link).port), False, "coordinator.example"))
    assert kind in caplog.text
    assert not bucket.requests


def test_a_coordinator_on_this_machine_can_send_us_to_this_machine_and_nowhere_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        Bucket(b"model").served() as link,
        elsewhere(redirected(link, False, "localhost"), 0, 5, math.inf) as response,
    ):
        assert response.read() == b"model"
    refuse(redirected("http://169.254.169.254/x", False, "localhost"))
    assert "a cloud's metadata service" in caplog.text


def test_whatever_fails_the_same_is_told(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    told = {refuse(redirected("", False)), refuse(redirected("http://127.0.0.1/x", False, "coordinator.example"))}
    with Bucket(b"").served() as gone:
        pass
    told.add(refuse(redirected(gone, False)))
    for status in (200, 206, 302, 403, 404):
        with Bucket(b"not what is wanted", (status, None)).served() as link:
            told.add(refuse(redirected(link, False)))
    assert len(told) == 1
    assert len({record.getMessage() for record in caplog.records if record.name == "umbel.client"}) >= 6


def refuse(redirected: Redirected) -> str:
    """What is said of a link that does not work."""
    with pytest.raises(LinkFailed) as failed, elsewhere(redirected, 0, 1, math.inf):
        pass
    return str(failed.value)


def redirected(location: str, is_secure: bool, host: str = "127.0.0.1") -> Redirected:
    return Redirected("http-307", "", 307, location, is_secure, host)
