"""A model that the coordinator keeps elsewhere: followed once, without a signature, never from TLS to plain HTTP."""

import hashlib
import math
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.client.doubles.double import TOKEN, Double, Handler, stream
from tests.client.doubles.double_server import served
from tests.servers.waits import LIMIT_S
from umbel.aggregation.plans.assignment import ModelRef
from umbel.client import run_client
from umbel.client.app import Client
from umbel.client.errors import LinkFailed, Redirected
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import TrainResult
from umbel.client.policy.policy import SitePolicy
from umbel.client.rounds.fetch import ModelFetcher
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.state.identity import Identity
from umbel.client.state.store import Store
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.destinations import LinkHost, LinkLevel, LinkRules
from umbel.client.wire.download import REST_S, Links
from umbel.client.wire.http_deadline import timed_by
from umbel.client.wire.timing import Backoff, Bandwidth, Timing
from umbel.client.wire.transport import Patience, Transport, connect

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


class Clock:
    """Seconds that pass only where somebody waits, or where `took` says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def to(*links: str, level: LinkLevel = "none", clock: Clock | None = None) -> Links:
    """Follows links to these hosts, and to those that `level` allows."""
    named = frozenset(LinkHost(url.host, url.port) for url in map(httpx.URL, links))
    return Links(LinkRules(level, named), clock or Clock())


TIMING = Timing(answer_s=5.0, stall_s=3.0, backoff=Backoff(first_s=0.0, longest_s=0.0))


def fetched(double: Double, handle: Handler, tmp_path: Path, links: Links, clock: Clock | None = None) -> bytes:
    wait = (clock or Clock()).wait
    key = Ed25519PrivateKey.generate()
    double.keys["ward-7"] = key.public_key().public_bytes_raw()
    data = double.model_bytes
    ref = ModelRef(0, hashlib.sha256(data).hexdigest(), len(data), double.layout.digest)
    with served(handle) as url, connect(url) as replicas:
        coordinator = CoordinatorClient(Transport(replicas, Identity("ward-7", key).authorize))
        patience = Patience(TIMING, time.monotonic() + LIMIT_S, wait)
        fetcher = ModelFetcher(coordinator, Store(tmp_path, url), double.layout, links)
        path, link = fetcher.fetch(ref, (), Bandwidth(), patience)
    assert link.down is not None
    return path.read_bytes()


def test_a_link_is_followed_without_a_signature(double: Double, tmp_path: Path) -> None:
    bucket = Bucket(double.model_bytes)
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path, to(link)) == double.model_bytes
    [asked] = bucket.requests
    known = {"host", "accept", "accept-encoding", "connection", "user-agent"}
    assert asked.keys() <= known
    assert double.log.count("GET models") == 1


def test_after_a_cut_a_new_link_is_asked_for_and_the_rest_fetched(double: Double, tmp_path: Path) -> None:
    bucket = Bucket(double.model_bytes, (200, 50_000), (206, 30_000))
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path, to(link)) == double.model_bytes
    assert [asked.get("range") for asked in bucket.requests] == [None, "bytes=50000-", "bytes=80000-"]
    assert double.log.count("GET models") == 3


@pytest.mark.parametrize("status", [403, 404, 500, 302, 307])
def test_a_link_that_brings_nothing_has_the_coordinator_serve_the_model_itself(
    status: int, double: Double, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(double.model_bytes, (status, 0))
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path, to(link)) == double.model_bytes
    assert len(bucket.requests) == 1
    assert f"the coordinator's link leads to 127.0.0.1, which answered HTTP {status}" in caplog.text
    assert SECRET not in caplog.text


def test_a_bucket_out_of_reach_has_the_coordinator_serve_the_model_itself(double: Double, tmp_path: Path) -> None:
    with Bucket(b"").served() as gone:
        pass
    assert fetched(double, sending_to(double, gone), tmp_path, to(gone)) == double.model_bytes


def test_what_came_before_a_link_failed_is_kept(double: Double, tmp_path: Path) -> None:
    bucket = Bucket(double.model_bytes, (200, 50_000), (403, 0))
    with bucket.served() as link:
        assert fetched(double, sending_to(double, link), tmp_path, to(link)) == double.model_bytes
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

        assert fetched(double, noted, tmp_path, to(link)) == double.model_bytes
    assert len(bucket.requests) == 1
    assert ranges == ["", ""], "how much a link has brought is not the coordinator's business"


def test_a_coordinator_that_is_asked_for_the_model_itself_and_sends_us_elsewhere_is_refused(
    double: Double, tmp_path: Path
) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        is_model = request.url.path.startswith("/v1/models/")
        return stream(307, b"", {"Location": link}) if is_model else double.handle(request)

    with Bucket(b"").served() as link, pytest.raises(Redirected):
        fetched(double, handle, tmp_path, to(link))


@pytest.mark.parametrize(
    "location", ["", "/v1/models/x", "ftp://host/x", "file:///etc/passwd", "https://user:word@host/x", "https://", "\t"]
)
def test_what_is_no_address_to_go_to_is_refused(location: str, caplog: pytest.LogCaptureFixture) -> None:
    refuse(redirected(location, False))
    assert "a malformed download link" in caplog.text


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
        ("http://10.0.3.7/x", "an address of a private network"),
    ],
)
@pytest.mark.parametrize("coordinator", ["coordinator.example", "127.0.0.1", "localhost", "10.0.3.7"])
def test_no_coordinator_wherever_it_is_can_send_us_to_this_machine_its_cloud_or_its_network(
    coordinator: str, location: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that seems to be near may be at the other end of a tunnel."""
    bucket = Bucket(b"secret")
    with bucket.served() as link:
        refuse(redirected(location.format(port=httpx.URL(link).port), False, coordinator), Links())
    assert kind in caplog.text
    assert not bucket.requests


def test_a_host_that_the_site_names_is_gone_to_even_on_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    with Bucket(b"model").served() as link, to(link).open(redirected(link, False), 0, 5, math.inf) as response:
        assert response.read() == b"model"
    with Bucket(b"other").served() as other:
        refuse(redirected(other, False), to(link))  # another port of it
    assert "this machine itself" in caplog.text


def test_whatever_fails_the_same_is_told(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    told = {refuse(redirected("", False)), refuse(redirected("http://127.0.0.1/x", False, "coordinator.example"))}
    with Bucket(b"").served() as gone:
        pass
    told.add(refuse(redirected(gone, False), to(gone)))
    for status in (200, 206, 302, 403, 404):
        with Bucket(b"not what is wanted", (status, None)).served() as link:
            told.add(refuse(redirected(link, False), to(link)))
    assert len(told) == 1
    assert len({record.getMessage() for record in caplog.records if record.name == "umbel.client"}) >= 6


def refuse(redirected: Redirected, links: Links | None = None) -> str:
    """What is said of a link that does not work."""
    with pytest.raises(LinkFailed) as failed, (links or Links()).open(redirected, 0, 1, math.inf):
        pass
    return str(failed.value)


def redirected(location: str, is_secure: bool, host: str = "127.0.0.1") -> Redirected:
    return Redirected("http-307", "", 307, location, is_secure, host)


# --- when the coordinator hears of it ---


@dataclass(frozen=True)
class Probe:
    """A link that a coordinator sends only to see what comes of it. `{port}`: of a server that answers `status`.

    `took_s`: how long that takes, on the client's clock. `body`: what the server sends, None for the wanted length.
    """

    location: str
    took_s: float
    status: int = 200
    body: bytes | None = None
    is_named: bool = True


PROBES = {
    "nobody listens": Probe("http://127.0.0.1:{closed}/x", 0.001),
    "no answer": Probe("http://127.0.0.1:{closed}/x", 3.2),  # the limit, noticed late
    "no TLS": Probe("https://127.0.0.1:{port}/x", 0.02),
    "not found": Probe("http://127.0.0.1:{port}/x", 0.004, 404),
    "forbidden": Probe("http://127.0.0.1:{port}/x", 0.9, 403),
    "sent on": Probe("http://127.0.0.1:{port}/x", 0.3, 302),
    "another length": Probe("http://127.0.0.1:{port}/x", 0.05, 200, b"<html>"),
    "another file": Probe("http://127.0.0.1:{port}/x", 2.5),
    "no address": Probe("gopher://x", 0.0, is_named=False),
    "no such name": Probe("http://nobody.invalid/x", 1.7, is_named=False),
    "an inner name": Probe("http://inner.example/x", 0.01, is_named=False),
    "an inner address": Probe("http://10.0.3.7:5432/x", 0.0, is_named=False),
    "no such port": Probe("http://inner.example:99999/x", 0.0, is_named=False),
}


def asked_again_after(probe: Probe, double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds from the link that the coordinator sends to the next request that it gets, on the client's clock."""
    clock, at, look_up = Clock(), list[float](), socket.getaddrinfo

    def looked_up(host: str, port: int, *more: int, **wanted: Any) -> Any:
        if wanted:  # a link's: other connections are made without
            clock.wait(probe.took_s)
            if host == "nobody.invalid":
                raise socket.gaierror("unknown")
        return look_up("10.0.3.7" if host == "inner.example" else host, port, *more, **wanted)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    answer = bytes(len(double.model_bytes)) if probe.body is None else probe.body
    with Bucket(b"").served() as closed:
        pass
    with Bucket(answer, (probe.status, None)).served() as open_:
        ports = {"closed": httpx.URL(closed).port, "port": httpx.URL(open_).port}
        location = probe.location.format(**ports)
        sending = sending_to(double, location)

        def noted(request: httpx.Request) -> httpx.Response:
            if request.url.path.startswith("/v1/models/"):
                at.append(clock.now)
            return sending(request)

        links = to(location, level="public", clock=clock) if probe.is_named else Links(clock=clock)
        assert fetched(double, noted, tmp_path, links, clock) == double.model_bytes
    assert len(at) == 2
    return at[1] - at[0]


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_when_the_coordinator_is_asked_again_does_not_tell_what_became_of_its_link(
    probe: Probe, double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_s = asked_again_after(probe, double, tmp_path, monkeypatch)
    assert after_s == pytest.approx(Links.pause_s(TIMING))


def test_a_pause_is_longer_than_all_that_may_come_before_the_head_of_an_answer() -> None:
    for stall_s in (3.0, 15.0):
        assert Links.pause_s(Timing(30.0, stall_s, TIMING.backoff)) >= stall_s + 1.0


def test_a_body_that_takes_longer_ends_at_a_whole_number_of_pauses(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Probe("http://127.0.0.1:{port}/x", 7.0)
    after_s = asked_again_after(slow, double, tmp_path, monkeypatch)
    assert after_s == pytest.approx(2 * Links.pause_s(TIMING))


def test_an_answer_whose_head_does_not_come_is_not_waited_for_any_longer_than_a_connection() -> None:
    """Else one that is held open could be told from one that is refused."""
    refused = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = f"http://127.0.0.1:{silent.getsockname()[1]}/x"

        def follow() -> None:
            with timed_by(Timing(answer_s=120.0, stall_s=0.2, backoff=TIMING.backoff)):
                refused.append(refuse(redirected(link, False), to(link)))

        thread = Thread(target=follow, daemon=True)
        thread.start()
        thread.join(60.0)
    assert refused


def test_after_a_link_that_brought_nothing_none_is_followed_for_a_while(double: Double, tmp_path: Path) -> None:
    """So that a coordinator learns little even if it learns something: one try in ten minutes."""
    clock = Clock()
    bucket = Bucket(double.model_bytes, (404, 0))
    with bucket.served() as link:
        links = to(link, clock=clock)
        for step, n_followed in enumerate((1, 1, 1, 2)):
            assert fetched(double, sending_to(double, link), tmp_path / str(step), links, clock) == double.model_bytes
            assert len(bucket.requests) == n_followed, step
            clock.wait(0.4 * REST_S)


def test_what_was_waited_for_the_clock_alone_is_not_taken_for_a_slow_line(double: Double, tmp_path: Path) -> None:
    clock = Clock()
    with Bucket(double.model_bytes, (404, 0)).served() as link:
        assert fetched(double, sending_to(double, link), tmp_path, to(link, clock=clock), clock)
    assert clock.now >= 100.0 + Links.pause_s(TIMING)


# --- the site's policy ---


class Ward(Client):
    sample_count = 1

    def __init__(self) -> None:
        self.model = torch.nn.Linear(100, 300)

    def train(self, model: torch.nn.Module, plan: LocalPlan) -> TrainResult:
        return TrainResult(1, 1, 1)


class Hurried(Shutdown):
    """Waits for nothing."""

    def wait(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("policy", "names_it", "is_followed"),
    [
        (None, False, False),
        (SitePolicy(), False, False),
        (SitePolicy(links="none"), False, False),
        (SitePolicy(links="private"), False, False),  # this machine is no private network
        (SitePolicy(links="none"), True, True),
    ],
    ids=["no file", "an empty file", "none", "private", "by name"],
)
def test_a_sites_policy_says_where_links_may_lead_in_a_run_without_secure_aggregation(
    policy: SitePolicy | None, names_it: bool, is_followed: bool, double: Double, tmp_path: Path
) -> None:
    asked = list[str]()
    bucket = Bucket(double.model_bytes)
    with bucket.served() as link:
        sending = sending_to(double, link)

        def noted(request: httpx.Request) -> httpx.Response:
            if request.url.path.startswith("/v1/models/"):
                asked.append(request.url.query.decode())
            return sending(request)

        if names_it and policy is not None:
            policy = replace(policy, link_hosts=(httpx.URL(link).netloc.decode(),))
        with served(noted) as url:
            end = run_client(Ward(), url, tmp_path, "demo", TOKEN, "ward-7", policy=policy, shutdown=Hurried())
    assert end.reports == 1
    assert bool(bucket.requests) is is_followed
    if policy is not None and policy.links == "none" and not policy.link_hosts:
        assert asked == ["direct=true"], "it does not ask for what it would not follow"
