"""The client's side of docs/reference/wire.md: one method for each request, typed both ways.

Each call is a single try. Every method may be repeated; the caller decides how (`transport.patiently`).
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from umbel.aggregation.messages import (
    REASON_CHARS_MAX,
    AssignmentCounts,
    AssignmentStatus,
    CheckedIn,
    CheckIn,
    Decline,
    Enrolled,
    Enrolment,
    NotComing,
    OpenRuns,
    ReportAnswer,
)
from umbel.aggregation.reports import EvaluationDone, MaskedInput, WorkDone
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.trust.signatures import content_digest
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.errors import AssignmentClosed, CoordinatorMisbehaved, CoordinatorRefused, printable
from umbel.client.wire.timing import check_s
from umbel.client.wire.transport import Body, HttpAnswer, Transport

_ENROLLED = TypeAdapter(Enrolled)
_CHECKED_IN = TypeAdapter(CheckedIn)
_OPEN_RUNS = TypeAdapter(OpenRuns)
_STATUS, _COUNTS = TypeAdapter(AssignmentStatus), TypeAdapter(AssignmentCounts)
_REPORT_ANSWER = TypeAdapter(ReportAnswer)
_JSON = {"Content-Type": "application/json"}
_BINARY = {"Content-Type": "application/octet-stream"}
# A roster has the longest entry for one client of all lists in a secure round, 132 bytes. A head has 36.
_ENTRY_BYTES, _HEAD_BYTES = 132, 64


@dataclass(frozen=True, slots=True)
class UploadState:
    """How much of an update the coordinator holds. `complete`: all of it, and all checks passed."""

    offset: int
    complete: bool


class CoordinatorClient:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def enrol(self, enrolment: Enrolment) -> Enrolled:
        return self._send_json("POST", "/v1/enrolments", enrolment).parse(_ENROLLED)

    def check_in(self, check_in: CheckIn) -> CheckedIn:
        """Held open for up to `check_in.wait_s` seconds."""
        checked_in = self._send_json("POST", "/v1/check-ins", check_in, hold_s=check_in.wait_s).parse(_CHECKED_IN)
        return replace(checked_in, reason=printable(checked_in.reason))

    def open_runs(self, after: str = "", mark: str = "", wait_s: float = 0.0) -> OpenRuns:
        """A page of the runs that are open to this client. Held open for up to `wait_s` seconds while it has `mark`."""
        query = f"after={after}&mark={quote(mark, safe='')}&{_wait(wait_s)}"
        found = self._transport.ask("GET", "/v1/runs", query=query, hold_s=wait_s).parse(_OPEN_RUNS)
        names = [run.name for run in found.runs]
        if names != sorted(set(names)) or not all(name > after for name in names):
            raise CoordinatorMisbehaved("the coordinator's list of runs is not sorted by name")
        if found.next not in ("", *names[-1:]):  # else its pages could go round in a circle
            raise CoordinatorMisbehaved("a page of the coordinator's list of runs does not end where the next begins")
        return found

    def not_coming(self, run: RunId, reason: str, *, may_come: bool) -> None:
        """Say why this client does not check in for an open run."""
        self._send_json("PUT", f"/v1/runs/{run}/not-coming", NotComing(_told(reason), may_come))

    def status(self, assignment: AssignmentId, wait_s: float = 0.0) -> AssignmentStatus:
        """Held open for up to `wait_s` seconds; answered at once when the round closes."""
        path = f"/v1/assignments/{assignment}"
        status = self._transport.ask("GET", path, query=_wait(wait_s), hold_s=wait_s).parse(_STATUS)
        return replace(status, reason=printable(status.reason))

    def counts(self, assignment: AssignmentId) -> bool:
        """Whether the run's newest model has the work of this assignment in it."""
        try:
            return self._transport.ask("GET", f"/v1/assignments/{assignment}/counts").parse(_COUNTS).counts
        except AssignmentClosed:
            return False  # the coordinator does not know it: it was restored from a backup
        except CoordinatorRefused as error:
            if error.kind != "not-found":
                raise
            return True  # a coordinator of an earlier release does not say; it had accepted the report

    @contextmanager
    def model(
        self, sha256: str, first_byte: int = 0, until: float = math.inf, is_direct: bool = False
    ) -> Generator[httpx.Response]:
        """The model file as a stream, from `first_byte` on if the answer's status is 206, else from the start.

        `until`: when it must be complete, on `time.monotonic`'s clock. `is_direct`: from the coordinator itself;
        otherwise it may raise `Redirected`.
        """
        headers = {"Range": f"bytes={first_byte}-", "If-Range": f'"{sha256}"'} if first_byte else None
        path, query = f"/v1/models/{sha256}", "direct=true" if is_direct else ""
        with self._transport.stream("GET", path, query=query, headers=headers, until=until) as response:
            yield response

    def create_upload(self, assignment: AssignmentId, total: int, sha256: str, chunk: Body) -> UploadState:
        """Begin an upload with its first bytes."""
        digest = content_digest(bytes.fromhex(sha256))
        headers = {"Upload-Length": str(total), "Repr-Digest": digest, **_BINARY}
        return self._send_chunk("POST", assignment, total, 0, chunk, headers)

    def append_upload(self, assignment: AssignmentId, total: int, offset: int, chunk: Body) -> UploadState:
        """Continue an upload at `offset`."""
        headers = {"Upload-Offset": str(offset), "Content-Type": "application/partial-upload"}
        return self._send_chunk("PATCH", assignment, total, offset, chunk, headers)

    def _send_chunk(
        self, method: str, assignment: AssignmentId, total: int, offset: int, chunk: Body, headers: Mapping[str, str]
    ) -> UploadState:
        is_last = offset + len(chunk) == total
        fields = {**headers, "Upload-Complete": "?1" if is_last else "?0"}
        hold_s = check_s(total) if is_last else 0.0  # the coordinator checks the update after the last chunk
        answer = self._transport.ask(method, _upload_path(assignment), body=chunk, headers=fields, hold_s=hold_s)
        return _upload_state(answer, total)

    def upload_state(self, assignment: AssignmentId, total: int) -> UploadState | None:
        """How much of an upload has arrived; None if none was begun."""
        try:
            return _upload_state(self._transport.ask("HEAD", _upload_path(assignment)), total)
        except CoordinatorRefused as error:
            # The answer to HEAD has no body, so no problem document says which of the 404s it is.
            if error.status == 404:
                return None
            raise

    def forget_upload(self, assignment: AssignmentId) -> None:
        self._transport.ask("DELETE", _upload_path(assignment))

    def report(self, assignment: AssignmentId, work: WorkDone | MaskedInput) -> ReportAnswer:
        answer = self._send_json("PUT", f"/v1/assignments/{assignment}/report", work).parse(_REPORT_ANSWER)
        return replace(answer, reason=printable(answer.reason))

    def report_evaluation(self, assignment: AssignmentId, done: EvaluationDone) -> ReportAnswer:
        answer = self._send_json("PUT", f"/v1/assignments/{assignment}/evaluation", done).parse(_REPORT_ANSWER)
        return replace(answer, reason=printable(answer.reason))

    def decline(self, assignment: AssignmentId, reason: str) -> None:
        self._send_json("PUT", f"/v1/assignments/{assignment}/decline", Decline(_told(reason)))

    def send_message(self, assignment: AssignmentId, phase: Phase, message: bytes, wait_s: float = 0.0) -> bool:
        """Send this client's message for a phase of a secure round. False if it must be sent again to await the result.

        `wait_s`: how long the coordinator may hold an unmasking message open for the result.
        """
        path, query = f"/v1/assignments/{assignment}/secure/{phase.value}", _wait(wait_s) if wait_s else ""
        answer = self._transport.ask("PUT", path, query=query, body=message, headers=_BINARY, hold_s=wait_s)
        return answer.status != 202

    def fetch_message(self, assignment: AssignmentId, phase: Phase, n_cohort: int, wait_s: float) -> bytes | None:
        """What a client of `n_cohort` needs for a phase; None if the coordinator does not have it within `wait_s`."""
        path, n_bytes = f"/v1/assignments/{assignment}/secure/{phase.value}", _HEAD_BYTES + n_cohort * _ENTRY_BYTES
        answer = self._transport.ask("GET", path, query=_wait(wait_s), hold_s=wait_s, bytes_max=n_bytes)
        return None if answer.status == 204 else answer.body

    def _send_json(self, method: str, path: str, message: object, hold_s: float = 0.0) -> HttpAnswer:
        adapter: TypeAdapter[Any] = TypeAdapter(type(message))
        return self._transport.ask(method, path, body=adapter.dump_json(message), headers=_JSON, hold_s=hold_s)


def _told(reason: str) -> str:
    """A reason as a message may have it (`messages.require_reason`)."""
    return reason[:REASON_CHARS_MAX].replace("\x00", " ") or "no reason given"


def _wait(wait_s: float) -> str:
    return f"wait_s={wait_s:.3f}"


def _upload_path(assignment: AssignmentId) -> str:
    return f"/v1/assignments/{assignment}/update"


def _upload_state(answer: HttpAnswer, total: int) -> UploadState:
    offset, complete = answer.headers.get("upload-offset", ""), answer.headers.get("upload-complete")
    if not (offset.isascii() and offset.isdigit() and len(offset) < 20) or int(offset) > total:
        raise CoordinatorMisbehaved(f"the coordinator's answer has no Upload-Offset between 0 and {total}")
    if complete not in ("?0", "?1") or (complete == "?1" and int(offset) != total):
        raise CoordinatorMisbehaved(
            "the coordinator's answer does not say whether the upload is complete (Upload-Complete)"
        )
    return UploadState(int(offset), complete == "?1")
