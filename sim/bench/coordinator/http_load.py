"""Many simulated devices from one thread: signed requests of docs/reference/wire.md over keep-alive sockets.

A script is a generator. It yields the bytes of a request and is sent its `RawAnswer`, or yields an `Until`. Scripts
that are ready wait for an idle connection, so ten thousand devices do not need ten thousand sockets. There is no
training and no SDK, and an answer is parsed only as far as the measurement needs, because the load must cost a fraction
of what the server does.
"""

import base64
import hashlib
import heapq
import json
import secrets
import selectors
import socket
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.trust.signatures import Target, content_digest, sign
from umbel.aggregation.update.wire import float32_header
from umbel.sim.bench.report import BenchFailed

_READ_BYTES = 1 << 16
_LENGTH = b"\r\ncontent-length: "


@dataclass(frozen=True, slots=True)
class Until:
    """A script waits until this time, in `time.perf_counter()`; its next request is due then."""

    at: float


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One response. `body`: without the head; `took_s`: from the request's due time to the answer's last byte."""

    status: int
    body: bytes
    took_s: float


Script: TypeAlias = Generator["bytes | Until", RawAnswer, None]


@dataclass(slots=True)
class Tally:
    """The answers of a load. `latencies_s`: in order of arrival."""

    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    statuses: Counter[int] = field(default_factory=Counter[int])
    first_refusal: bytes = b""
    began_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0

    @property
    def wall_s(self) -> float:
        return self.ended_at - self.began_at

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies_s) / self.wall_s

    def quantile_ms(self, q: float) -> float:
        """A quantile of the latencies, in milliseconds."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]

    def require_all(self, status: int) -> None:
        """Raise `BenchFailed` unless every answer had this status."""
        if set(self.statuses) - {status}:
            raise BenchFailed(
                f"not every answer had the status {status}: the statuses and their numbers are "
                f"{dict(self.statuses)}; the first refusal is {self.first_refusal!r}"
            )

    def note(self, answer: RawAnswer) -> None:
        self.latencies_s.append(answer.took_s)
        self.statuses[answer.status] += 1
        if answer.status >= 300 and not self.first_refusal:
            self.first_refusal = answer.body[:500]


@dataclass(slots=True)
class _Link:
    """One connection. `script`: that waits for an answer; `received`: of the answer so far."""

    socket: socket.socket
    script: Script | None = None
    due_at: float = 0.0
    unsent: bytes = b""
    received: bytes = b""


class Load:
    """Connections to one server. Close it, or use it in a `with` statement."""

    def __init__(self, url: str, n_connections: int) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._selector = selectors.DefaultSelector()
        self._links = [self._connect() for _ in range(n_connections)]
        self._idle = deque(self._links)
        self._ready: deque[tuple[Script, bytes, float]] = deque()
        self._paused: list[tuple[float, int, Script]] = []
        self._order = count()

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_raised: object) -> None:
        for link in self._links:
            link.socket.close()
        self._selector.close()

    def _connect(self) -> _Link:
        link = _Link(socket.create_connection(self._address, timeout=30.0))
        link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket.setblocking(False)
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        return link

    def run(
        self, scripts: Iterable[Script], is_over: Callable[[], bool] = lambda: False, stall_s: float = 60.0
    ) -> Tally:
        """Run all scripts to their ends, or until `is_over()`; then wait for open answers.

        `scripts` may be endless. Raises `BenchFailed` if nothing moves for `stall_s`.
        """
        tally, fresh = Tally(), iter(scripts)
        while self._work_left(fresh, is_over):
            timeout_s = stall_s
            if self._paused:
                timeout_s = max(0.0, min(stall_s, self._paused[0][0] - time.perf_counter()))
            events = self._selector.select(timeout_s)
            if not events and timeout_s == stall_s and (n_owed := len(self._links) - len(self._idle)):
                raise BenchFailed(f"no answer came for {stall_s:.0f} s; {n_owed} requests are still unanswered")
            for key, _ in events:
                self._attend(key.data, tally)
        tally.ended_at = time.perf_counter()
        return tally

    def _work_left(self, fresh: Iterator[Script], is_over: Callable[[], bool]) -> bool:
        """Send what can be sent; return whether work is left."""
        now = time.perf_counter()
        if is_over():
            self._ready.clear()
            self._paused.clear()
            return len(self._idle) < len(self._links)
        while self._paused and self._paused[0][0] <= now:
            due_at, _, script = heapq.heappop(self._paused)
            self._step(script, None, due_at)
        while self._idle:
            if self._ready:
                script, request, due_at = self._ready.popleft()
                self._send(self._idle.popleft(), script, request, due_at)
            elif (script_or_none := next(fresh, None)) is not None:
                self._step(script_or_none, None, now)
            else:
                break
        return bool(self._paused or self._ready) or len(self._idle) < len(self._links)

    def _step(self, script: Script, answer: RawAnswer | None, due_at: float) -> None:
        """Resume a script, and queue its next request or pause."""
        try:
            wanted = next(script) if answer is None else script.send(answer)
        except StopIteration:
            return
        if isinstance(wanted, Until):
            heapq.heappush(self._paused, (wanted.at, next(self._order), script))
        else:
            self._ready.append((script, wanted, due_at))

    def _send(self, link: _Link, script: Script, request: bytes, due_at: float) -> None:
        link.script, link.due_at, link.received = script, due_at, b""
        sent = link.socket.send(request)
        link.unsent = request[sent:]
        if link.unsent:
            self._selector.modify(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _attend(self, link: _Link, tally: Tally) -> None:
        if link.unsent:
            link.unsent = link.unsent[link.socket.send(link.unsent) :]
            if not link.unsent:
                self._selector.modify(link.socket, selectors.EVENT_READ, link)
            return
        piece = link.socket.recv(_READ_BYTES)
        if not piece or link.script is None:
            raise BenchFailed(f"the server closed the connection after {link.received[:200]!r}")
        link.received = link.received + piece if link.received else piece
        if (parsed := _parse(link.received)) is None:
            return
        now = time.perf_counter()
        answer = RawAnswer(*parsed, now - link.due_at)
        tally.note(answer)
        script, link.script = link.script, None
        self._idle.append(link)
        self._step(script, answer, now)


def _parse(received: bytes) -> tuple[int, bytes] | None:
    """Status and body of a response with a Content-Length, or None while it is incomplete."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return None
    at = head.lower().find(_LENGTH)
    length = 0 if at < 0 else int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])
    return (int(head[9:12]), body) if len(body) >= length else None


SAMPLE_COUNT = 10


@dataclass(frozen=True, slots=True)
class SimDevice:
    """A simulated device with its key."""

    name: str
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)

    def request(self, method: str, path: str, body: bytes = b"", fields: Mapping[str, str] | None = None) -> bytes:
        """A signed request as bytes. `fields`: further header fields."""
        head = self.head(method, path, hashlib.sha256(body).digest(), len(body), fields)
        return head + body

    def head(
        self, method: str, path: str, sha256: bytes, n_bytes: int, fields: Mapping[str, str] | None = None
    ) -> bytes:
        """The head of a request with a body of `n_bytes` that hashes to `sha256`."""
        target, _, query = path.partition("?")
        created, nonce = int(time.time()), secrets.token_urlsafe(16)
        signed = sign(self.key, self.name, Target(method, target, query), sha256, created, nonce)
        lines = {"Host": "bench", "Content-Type": "application/json", "Content-Length": str(n_bytes)}
        lines |= signed.as_dict() | dict(fields or {})
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode()

    def enrolment(self, token: str, tier: str) -> bytes:
        """POST /v1/enrolments."""
        public_key = base64.b64encode(self.key.public_key().public_bytes_raw()).decode()
        body = {"token": token, "client": self.name, "public_key": public_key, "labels": {"tier": tier}}
        return self.request("POST", "/v1/enrolments", json.dumps(body).encode())

    def check_in(self, body: bytes) -> bytes:
        """POST /v1/check-ins."""
        return self.request("POST", "/v1/check-ins", body)

    def upload(self, assignment: str, update: bytes) -> bytes:
        """POST the whole update."""
        digest = content_digest(hashlib.sha256(update).digest())
        fields = {"Upload-Length": str(len(update)), "Upload-Complete": "?1", "Repr-Digest": digest}
        return self.request("POST", f"/v1/assignments/{assignment}/update", update, fields)

    def report(self, assignment: str, update: bytes) -> bytes:
        """PUT the report of that update."""
        sha256 = hashlib.sha256(update).hexdigest()
        work = {"sample_count": SAMPLE_COUNT, "steps_done": 1, "steps_planned": 1, "update_sha256": sha256}
        return self.request("PUT", f"/v1/assignments/{assignment}/report", json.dumps(work).encode())


def check_in_body(run: str, layout_digest: str, sample_count: int, wait_s: float = 0.0) -> bytes:
    """The JSON of a check-in."""
    message = {"run": run, "sample_count": sample_count, "layout_digest": layout_digest, "wait_s": wait_s}
    return json.dumps(message).encode()


def once(request: bytes) -> Script:
    """A script of one request."""
    yield request


def take_part(device: SimDevice, run: str, layout: Layout, outcomes: list[str]) -> Script:
    """Check in until the run is over, carry out assignments, and collect the outcomes of reports.

    An upload that comes too late for its round (409) counts as released.
    """
    body = check_in_body(run, layout.digest, SAMPLE_COUNT)
    update = float32_header(layout).encode() + bytes(4 * layout.n_values)
    while True:
        answer = yield device.check_in(body)
        checked_in: dict[str, Any] = json.loads(answer.body)
        if answer.status != 200:
            raise BenchFailed(f"a check-in was answered {answer.status}: {answer.body!r}")
        if checked_in["assignment"] is not None:
            assignment = str(checked_in["assignment"]["id"])
            answer = yield device.upload(assignment, update)
            if answer.status == 409:
                outcomes.append("released")
                continue
            answer = yield device.report(assignment, update)
            outcomes.append(str(json.loads(answer.body).get("outcome", answer.status)))
        elif checked_in["run_status"] != "running":
            return
        else:
            yield Until(time.perf_counter() + float(checked_in["retry_after_s"]))
