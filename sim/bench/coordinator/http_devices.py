"""Simulated devices that speak docs/reference/wire.md in signed requests, for `load.Load`; no training, no SDK."""

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.trust.signatures import Target, content_digest, sign
from umbel.aggregation.update.wire import float32_header
from umbel.sim.bench.coordinator.http_load import LoadFailed, Script, Until

SAMPLE_COUNT = 10


@dataclass(frozen=True, slots=True)
class SimDevice:
    """One enrolled, or soon enrolled, device."""

    name: str
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)

    def request(self, method: str, path: str, body: bytes = b"", fields: Mapping[str, str] | None = None) -> bytes:
        """A whole signed request, as it goes over the wire. `fields`: further header fields."""
        head = self.head(method, path, hashlib.sha256(body).digest(), len(body), fields)
        return head + body

    def head(
        self, method: str, path: str, sha256: bytes, n_bytes: int, fields: Mapping[str, str] | None = None
    ) -> bytes:
        """The head of a request with a body of `n_bytes` that hashes to `sha256`, whether it will come or not."""
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
    """Check in until the run is over; do what is assigned, and note what each report is told.

    An upload that the round no longer waits for (409) is noted as released.
    """
    body = check_in_body(run, layout.digest, SAMPLE_COUNT)
    update = float32_header(layout).encode() + bytes(4 * layout.n_values)
    while True:
        answer = yield device.check_in(body)
        checked_in: dict[str, Any] = json.loads(answer.body)
        if answer.status != 200:
            raise LoadFailed(f"a check-in was answered {answer.status}: {answer.body!r}")
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
