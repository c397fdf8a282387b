"""A coordinator in memory that speaks docs/reference/wire.md and checks every signature, for the client's tests.

It is written from the page, not from the server's code, so that each end is tested against the page. Faults are added
by wrapping `Double.handle`.
"""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import torch

from tests.federations.whole_states import next_master, published_state
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.messages import Enrolment
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import master_of
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.trust.signatures import SignedHeaders, Target, content_digest, parse, parse_digest
from umbel.aggregation.update.grid import GridAccumulator

URL = "https://coordinator.test"
TOKEN = "one-time"
Handler = Callable[[httpx.Request], httpx.Response]


@dataclass
class Incoming:
    """An upload that has begun."""

    total: int
    sha256: bytes
    data: bytearray = field(default_factory=bytearray)


class Double:
    """One run, one client at a time, one round after another until `rounds` reports have counted."""

    def __init__(
        self, model: torch.nn.Module, rounds: int = 1, window_s: float = 60.0, training: TrainingSection | None = None
    ) -> None:
        self.run_file = RunFile(
            "demo", RoundsSection(rounds, target=1, window_s=window_s), training=training or TrainingSection()
        )
        self.model_bytes = encode_model(model.state_dict())
        self.layout, _ = decode_model(self.model_bytes)
        self.keys: dict[str, bytes] = {}
        self.tokens: dict[str, str] = {TOKEN: ""}
        self.nonces: set[str] = set()
        self.uploads: dict[str, Incoming] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.uncounted: set[str] = set()  # assignments whose reports were accepted and whose rounds were not
        self.declined: dict[str, str] = {}
        self.updates: list[torch.Tensor] = []
        self.closed: dict[str, str] = {}
        self.requests: Counter[str] = Counter()
        self.log: list[str] = []
        self.codec = CodecPlan()
        self.version_ahead = 0
        self.round = 1
        self.attempt = 1
        self._lock = threading.RLock()

    def transport(self, wrap: Callable[[Handler], Handler] = lambda handler: handler) -> httpx.MockTransport:
        return httpx.MockTransport(wrap(self.handle))

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        with self._lock:
            self.requests[kind_of(request)] += 1
            self.log.append(kind_of(request))
            try:
                self._authenticate(request, body)
                return self._route(request, body)
            except Refused as error:
                return problem(error.status, error.kind, error.headers)

    def repeats_round(self, number: int) -> None:
        """A rollback: the newest version is there, and the round is made again."""
        self.version_ahead = self.round - number
        self.round, self.attempt = number, self.attempt + 1

    def close_round(self, reason: str) -> None:
        """The round ends without this client; the next one begins."""
        with self._lock:
            self.closed[self._assignment_id(self._client())] = reason
            self.round += 1

    # --- requests ---

    def _authenticate(self, request: httpx.Request, body: bytes) -> None:
        fields = [request.headers[name] for name in ("content-digest", "signature-input", "signature")]
        claims = parse(SignedHeaders(*fields))
        path, _, query = request.url.raw_path.decode().partition("?")
        key = self.keys.get(claims.key_id)
        if path == "/v1/enrolments":
            enrolment = Enrolment(**json.loads(body))
            key = enrolment.public_key_bytes
        if key is None:
            raise Refused(401, "bad-signature")
        claims.verify(key, Target(request.method, path, query), time.time())
        if claims.nonce in self.nonces:
            raise Refused(401, "replayed-nonce")
        self.nonces.add(claims.nonce)
        assert claims.body_sha256 == hashlib.sha256(body).digest()
        request.extensions["client"] = claims.key_id

    def _route(self, request: httpx.Request, body: bytes) -> httpx.Response:
        path = request.url.path
        client = request.extensions["client"]
        if path == "/v1/enrolments":
            return self._enrol(Enrolment(**json.loads(body)))
        if path == "/v1/check-ins":
            return self._check_in(client, json.loads(body))
        if path.startswith("/v1/models/"):
            return self._model(request)
        match = re.fullmatch(r"/v1/assignments/([^/]+)(?:/(update|report|decline|counts))?", path)
        if match is None or not match[1].endswith(f".{client}"):
            raise Refused(404, "unknown-assignment")
        match match[2]:
            case "update":
                return self._update(match[1], request, body)
            case "report":
                return self._report(match[1], json.loads(body))
            case "decline":
                self.declined[match[1]] = json.loads(body)["reason"]
                self.attempt += 1
                return stream(204, b"")
            case "counts":
                return answer({"counts": match[1] in self.reports and match[1] not in self.uncounted})
            case _:
                return self._status(match[1])

    def _enrol(self, enrolment: Enrolment) -> httpx.Response:
        if enrolment.token not in self.tokens:
            raise Refused(401, "unknown-token")
        if self.tokens[enrolment.token] not in ("", enrolment.public_key):
            raise Refused(409, "token-used")
        self.tokens[enrolment.token] = enrolment.public_key
        self.keys[enrolment.client] = enrolment.public_key_bytes
        return answer({"client": enrolment.client, "server_time": time.time()})

    def _check_in(self, client: str, message: dict[str, Any]) -> httpx.Response:
        if message["run"] != self.run_file.name:
            raise Refused(404, "unknown-run")
        if self.round > self.run_file.rounds.count:
            return answer({"run_status": "finished", "reason": "all rounds are done", "retry_after_s": 0})
        return answer(
            {"run_status": "running", "reason": "", "retry_after_s": 0, "assignment": self._assignment(client)}
        )

    def _model(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith(hashlib.sha256(self.model_bytes).hexdigest()):
            raise Refused(404, "unknown-model")
        first = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
        start = int(first[1]) if first else 0
        return stream(206 if first else 200, self.model_bytes[start:])

    def _status(self, assignment: str) -> httpx.Response:
        if assignment in self.closed:
            return answer({"state": "closed", "reason": self.closed[assignment], "window_s": 0})
        return answer({"state": "open", "reason": "", "window_s": self.run_file.rounds.window_s})

    def _update(self, assignment: str, request: httpx.Request, body: bytes) -> httpx.Response:
        upload = self.uploads.get(assignment)
        if request.method == "DELETE":
            self.uploads.pop(assignment, None)
            return stream(204, b"")
        if request.method == "HEAD":
            if upload is None:
                return stream(404, b"")
            return self._upload_answer(200, upload)
        if assignment in self.closed:
            raise Refused(409, "assignment-closed")
        if request.method == "POST":
            total, sha256 = int(request.headers["upload-length"]), parse_digest(request.headers["repr-digest"])
            if upload is None or (upload.total, upload.sha256) != (total, sha256):
                upload = self.uploads[assignment] = Incoming(total, sha256)
            if not upload.data:
                self._append(upload, request, body)
            return self._upload_answer(201, upload)
        if upload is None:
            raise Refused(404, "unknown-upload")
        if int(request.headers["upload-offset"]) != len(upload.data):
            raise Refused(409, "mismatching-upload-offset", {"Upload-Offset": str(len(upload.data))})
        assert request.headers["content-type"] == "application/partial-upload"
        self._append(upload, request, body)
        return self._upload_answer(204, upload)

    def _append(self, upload: Incoming, request: httpx.Request, body: bytes) -> None:
        upload.data += body
        assert (request.headers["upload-complete"] == "?1") == (len(upload.data) == upload.total)
        if len(upload.data) == upload.total:
            assert hashlib.sha256(upload.data).digest() == upload.sha256
            self._read(bytes(upload.data))

    def _upload_answer(self, status: int, upload: Incoming) -> httpx.Response:
        complete = "?1" if len(upload.data) == upload.total else "?0"
        fields = {
            "Upload-Offset": str(len(upload.data)),
            "Upload-Complete": complete,
            "Upload-Length": str(upload.total),
        }
        return stream(status, b"", fields)

    def _report(self, assignment: str, work: dict[str, Any]) -> httpx.Response:
        if assignment not in self.reports:
            upload = self.uploads[assignment]
            assert len(upload.data) == upload.total
            assert content_digest(upload.sha256) == content_digest(bytes.fromhex(work["update_sha256"]))
            self.reports[assignment] = work
            self._commit(bytes(upload.data))
        return answer({"outcome": "accepted", "reason": "counted"})

    def _commit(self, update: bytes) -> None:
        values = self._read(update)
        self.updates.append(values)
        _, state = decode_model(self.model_bytes)
        total = GridAccumulator(self.layout.n_values, self.run_file.round_plan(1, 1).grid)
        total.fold_vector(values, 1)
        master = next_master(self.layout, master_of(self.layout, state), total)
        self.model_bytes = encode_model(self.layout.full_state(published_state(self.layout, master)))
        self.round, self.attempt = self.round + 1, 1

    def _read(self, update: bytes) -> torch.Tensor:
        """The weight change in an update of a codec whose integers stand on the round's grid."""
        grid = self.run_file.round_plan(1, 1).grid
        codec = codec_for(self.codec, grid, self.layout)
        levels = codec.integers(update[: codec.header_bytes], [update[codec.header_bytes :]], 0)
        return (torch.cat(list(levels)).to(torch.float64) * grid.step).to(torch.float32)

    # --- what is asked ---

    def _client(self) -> str:
        return next(iter(self.keys))

    def _assignment_id(self, client: str) -> str:
        return f"{self.run_file.name}.{self.round}.{self.attempt}.{client}"

    def _assignment(self, client: str) -> dict[str, Any]:
        plan, training = self.run_file.round_plan(self.round, self.attempt), self.run_file.training_plan(self.round)
        grid = plan.grid
        return {
            "id": self._assignment_id(client),
            "run": self.run_file.name,
            "round": self.round,
            "attempt": self.attempt,
            "model": {
                "version": self.round - 1 + self.version_ahead,
                "sha256": hashlib.sha256(self.model_bytes).hexdigest(),
                "size_bytes": len(self.model_bytes),
                "layout_digest": self.layout.digest,
            },
            "training": asdict(training),
            "codec": asdict(self.codec),
            "grid": {"step": grid.step, "max_abs": grid.max_abs, "total_weight_max": grid.total_weight_max},
            "sample_count_max": plan.sample_count_max,
            "seed": 1000 + self.round,
            "window_s": plan.window_s,
        }


class Refused(Exception):
    """Becomes a problem document."""

    def __init__(self, status: int, kind: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(kind)
        self.status, self.kind, self.headers = status, kind, headers or {}


def kind_of(request: httpx.Request) -> str:
    """A request's method and the last word of its path that is a word of the protocol."""
    words = {"enrolments", "check-ins", "models", "assignments", "update", "report", "decline", "counts"}
    return f"{request.method} {next(word for word in reversed(request.url.path.split('/')) if word in words)}"


def answer(message: object) -> httpx.Response:
    return stream(200, json.dumps(message).encode(), {"Content-Type": "application/json"})


def problem(status: int, kind: str, headers: dict[str, str] | None = None) -> httpx.Response:
    document = {"type": f"urn:umbel:problem:{kind}", "title": kind, "status": status, "detail": f"because of {kind}"}
    return stream(status, json.dumps(document).encode(), headers or {})


def stream(status: int, body: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    """An answer whose body is read from a stream, as over a socket."""
    return httpx.Response(status, headers=headers, content=_pieces(body))


def _pieces(body: bytes, size: int = 1 << 16) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def layout_of_module(model: torch.nn.Module) -> Layout:
    return Layout.of_state(model.state_dict())
