"""A coordinator in memory with one run and one client, which speaks docs/reference/wire.md as far as a check needs it.

It believes its client, because both are in one process: it checks no signature, and keeps nothing on disk.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import TypeAdapter

from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS, FairReport, step_factor
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.messages import (
    AssignmentCounts,
    AssignmentState,
    AssignmentStatus,
    CheckedIn,
    CheckIn,
    Enrolled,
    Enrolment,
    Outcome,
    Problem,
    ReportAnswer,
    RunStatus,
)
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import ServerStep, empty_master, first_master_copy, write_next
from umbel.aggregation.model.state import InMemory, empty_state, torch_dtype, with_first_control
from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.plans.assignment import Assignment, ModelRef, assignment_id
from umbel.aggregation.plans.codec import CodecPlan, Grid, Part
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.types import ClientId, RunId
from umbel.client.rounds.shutdown import Shutdown

ADDRESS = "https://check.invalid"
TOKEN = "check"  # noqa: S105 - any text enrols the client of a check
_PIECE_BYTES = 1 << 18
_PATH = re.compile(r"/v1/assignments/([^/]+)(?:/(.+))?")


@dataclass(slots=True)
class _Upload:
    total: int  # bytes
    data: bytearray = field(default_factory=bytearray)


class CheckCoordinator:
    """`file`: the run, of one client a round. `codec`: of all its rounds. `seed`: of all trainings. A client that
    declines is asked to leave (`shutdown`).
    """

    def __init__(self, file: RunFile, layout: Layout, model: bytes, codec: CodecPlan, seed: int) -> None:
        state = decode_model(model)[1]
        if file.training.has_control:
            layout = layout.with_control
            state = with_first_control(state, layout)
            model = encode_model(state, layout)
        self.file, self.layout, self.model, self.codec, self.seed = file, layout, model, codec, seed
        self.shutdown = Shutdown()
        self.round = 1
        self.declined = ""  # the reason
        self.reports: list[WorkDone] = []
        self._keys: dict[str, str] = {}  # by client
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.RLock()
        self._master = first_master_copy(layout, optimizer_of(*file.server_terms()), state)

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        with self._lock:
            try:
                return self._answer(request, body)
            except AnswerRefused as error:
                return _json(error.problem, error.problem.status)

    def _answer(self, request: httpx.Request, body: bytes) -> httpx.Response:
        path = request.url.path
        if path == "/v1/enrolments":
            return self._enrol(Enrolment(**json.loads(body)))
        if path == "/v1/check-ins":
            return _json(self._check_in(CheckIn(**json.loads(body))))
        if path.startswith("/v1/models/"):
            return stream(200, self.model)
        if (found := _PATH.fullmatch(path)) is None:
            raise AnswerRefused(404, "not-found", f"the check's coordinator has no {path}")
        return self._answer_of_assignment(found[1], found[2] or "", request, body)

    def _answer_of_assignment(self, name: str, what: str, request: httpx.Request, body: bytes) -> httpx.Response:
        match what:
            case "":
                return _json(AssignmentStatus(AssignmentState.OPEN, "", self.file.rounds.window_s))
            case "counts":
                return _json(AssignmentCounts(counts=True))  # each report makes a model here
            case "update":
                return self._update(name, request, body)
            case "report":
                return _json(self._report(name, body))
            case "decline":
                self.declined = json.loads(body)["reason"]
                self.shutdown.request("the client declined")
                return stream(204, b"")
            case _:
                raise AnswerRefused(404, "not-found", f"the check's coordinator has no {what}")

    def _enrol(self, enrolment: Enrolment) -> httpx.Response:
        self._keys[enrolment.client] = enrolment.public_key
        return _json(Enrolled(enrolment.client, time.time()))

    def _check_in(self, message: CheckIn) -> CheckedIn:
        if message.layout_digest != self.layout.model.digest:
            detail = "the client's model has other tensors than the run's"
            raise AnswerRefused(409, "wrong-layout", detail, self.file)
        if self.round > self.file.rounds.count:
            return CheckedIn(RunStatus.FINISHED, "all rounds are done", 0.0)
        return CheckedIn(RunStatus.RUNNING, "", 0.0, self._assignment())

    # --- the update ---------------------------------------------------------------------------------------------------

    def _update(self, name: str, request: httpx.Request, body: bytes) -> httpx.Response:
        if request.method == "POST":
            self._uploads[name] = _Upload(int(request.headers["upload-length"]))
        upload = self._uploads[name]
        upload.data += body
        is_whole = len(upload.data) == upload.total
        fields = {"Upload-Offset": str(len(upload.data)), "Upload-Complete": "?1" if is_whole else "?0"}
        return stream(201 if request.method == "POST" else 204, b"", fields)

    def _take_update(self, name: str, update_sha256: str) -> bytearray:
        """The update whose report has come. It is not kept."""
        update = self._uploads.pop(name).data
        if hashlib.sha256(update).hexdigest() != update_sha256:
            raise AnswerRefused(422, "malformed-update", "the update is not the one that the report names")
        return update

    def _report(self, name: str, body: bytes) -> ReportAnswer:
        work = TypeAdapter(WorkDone).validate_json(body)
        update = self._take_update(name, work.update_sha256)
        self.reports.append(work)
        codec, rounds = codec_for(self.codec, self._grid, self.layout), self.file.rounds
        total, head = codec.new_sum(), codec.header_bytes
        total.add(codec.integers(bytes(update[:head]), [memoryview(update)[head:]], 0), work.sample_count)
        factor = float(work.steps_done) if self.file.training.is_normalised else 1.0
        if (fair := self.file.training_plan(self.round).fair_terms) is not None:
            said = FairReport(work.sample_count, work.metrics[START_LOSS], work.metrics[CHANGE_NORM])
            factor = step_factor([said], fair)
        terms = self.file.server_terms(self.round)
        weight = work.sample_count
        step = ServerStep.of(terms, self.round, rounds.count, rounds.target, factor=factor, total_weight=weight)
        public, master = empty_state(self.layout, torch_dtype), empty_master(self.layout, step.optimizer)
        mean = codec.mean(total, [Part(work.sample_count, 0)])
        write_next(self.layout, InMemory(self._master), mean, step, InMemory(public), InMemory(master))
        self._master = master
        self.model = encode_model(self.layout.full_state(public), self.layout)
        self.round += 1
        return ReportAnswer(Outcome.ACCEPTED, "counted")

    # --- what is asked ------------------------------------------------------------------------------------------------

    @property
    def client(self) -> ClientId:
        """The client that has enrolled."""
        return ClientId(next(iter(self._keys)))

    @property
    def _grid(self) -> Grid:
        return self.file.round_plan(self.round, 1).grid

    def _assignment(self) -> Assignment:
        file, name = self.file, RunId(self.file.name)
        plan = file.round_plan(self.round, 1)
        sha256 = hashlib.sha256(self.model).hexdigest()
        return Assignment(
            id=assignment_id(name, self.round, 1, self.client),
            run=name,
            round=self.round,
            attempt=1,
            model=ModelRef(self.round - 1, sha256, len(self.model), self.layout.digest),
            training=file.training_plan(self.round),
            codec=self.codec,
            grid=plan.grid,
            sample_count_max=plan.sample_count_max,
            seed=self.seed,
            window_s=plan.window_s,
            tensors=file.tensor_rules,
        )


class AnswerRefused(Exception):
    """Becomes a problem document. `file`: the run file whose [tensors] the document carries."""

    def __init__(self, status: int, kind: str, detail: str, file: RunFile | None = None) -> None:
        super().__init__(detail)
        self.problem = Problem(f"urn:umbel:problem:{kind}", kind, status, detail, file.tensor_rules if file else None)


def _json(message: object, status: int = 200) -> httpx.Response:
    adapter: TypeAdapter[Any] = TypeAdapter(type(message))
    kind = "application/problem+json" if isinstance(message, Problem) else "application/json"
    return stream(status, adapter.dump_json(message), {"Content-Type": kind})


def stream(status: int, body: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    """An answer whose body is read as a stream, as over a network."""
    return httpx.Response(status, headers=headers, content=_pieces(body))


def _pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
