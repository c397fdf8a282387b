"""The JSON bodies of the control messages, one dataclass each, shared by both ends; tensors have `wire.py`.

Plain dataclasses: the server hands them to FastAPI, the client to pydantic's `TypeAdapter`, and both get the same
checks from the constructors here.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from umbel.aggregation.canonical import EXACT_MAX, later
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import RunId, require_sample_count, require_sha256, require_slug

TOKEN_CHARS_MAX = 256
LABELS_MAX = 16
REASON_CHARS_MAX = 1000  # so that what a policy refuses has room for what to do about it
WAIT_S_MAX = 30.0
OPEN_RUNS_PAGE_MAX = 100
MARK_CHARS_MAX = 64
LAYOUT_CHARS_MAX = 30_000  # as a string in JSON, at most twice as long: that is still a control message


@dataclass(frozen=True, slots=True)
class Enrolment:
    """POST /v1/enrolments: a one-time token for a name and a public key (raw Ed25519, base64), signed with that key.

    `labels`: facts a site states about itself, such as `{"side": "north"}`; those that its token binds may be left out.
    """

    token: str = field(repr=False)
    client: str
    public_key: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        require_slug(self.client, "client")
        if not 1 <= len(self.token) <= TOKEN_CHARS_MAX:
            raise ValueError("token is empty or too long")
        require_labels(self.labels)
        _ = self.public_key_bytes

    @property
    def public_key_bytes(self) -> bytes:
        return public_key_bytes(self.public_key)


@dataclass(frozen=True, slots=True)
class Enrolled:
    """The answer to an enrolment. `server_time`: Unix seconds, so that a client can see a wrong clock."""

    client: str
    server_time: float


@dataclass(frozen=True, slots=True)
class CheckIn:
    """POST /v1/check-ins: ready to work for `run`, with this much data and this model layout.

    `sample_count`: 0 where it is not told; the coordinator asks for it if the run needs it (`sample-count-needed`).
    Held open for up to `wait_s` seconds until there is work. `layout`: the canonical JSON that has this digest, from a
    client that was refused for it, so that the operator hears what differs; else empty.
    """

    run: RunId
    sample_count: int
    layout_digest: str
    wait_s: float = WAIT_S_MAX
    layout: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        require_slug(self.run, "run")
        require_sample_count(self.sample_count, "sample_count", least=0)
        require_sha256(self.layout_digest, "layout_digest")
        if not 0 <= self.wait_s <= WAIT_S_MAX:
            raise ValueError(f"wait_s must lie between 0 and {WAIT_S_MAX:g}")
        if len(self.layout) > LAYOUT_CHARS_MAX:
            raise ValueError(f"layout must have at most {LAYOUT_CHARS_MAX} characters")
        if self.layout and hashlib.sha256(self.layout.encode()).hexdigest() != self.layout_digest:
            raise ValueError("layout must be the text whose SHA-256 is layout_digest")


class RunStatus(StrEnum):
    """Where a run is in its life.

    ```
    running <--> paused           an operator pauses and resumes; no client is asked to work meanwhile
       |            |
       +------------+---> finished | stopped | failed         the end
    ```
    """

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether it has ended; a paused run can be resumed."""
        return self not in (RunStatus.RUNNING, RunStatus.PAUSED)


@dataclass(frozen=True, slots=True)
class CheckedIn:
    """The answer to a check-in: an assignment, or none and when to come again.

    A client with an open assignment gets it again, so a restarted client resumes its work.
    """

    run_status: RunStatus
    reason: str
    retry_after_s: float
    assignment: Assignment | None = None

    def __post_init__(self) -> None:
        _require_seconds(self.retry_after_s, "retry_after_s")


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that the client that asks may take part in: what its site needs to decide whether it does."""

    name: RunId
    status: RunStatus
    created_at: float  # Unix seconds
    rounds: int  # planned
    minimum: int  # the fewest clients whose updates make a model and, if they are masked, whose metrics are summed
    n_values: int  # of an update
    model_sha256: str  # of the first model
    run_file_sha256: str  # of the run file's canonical JSON, as in the run's first audit bundle
    members_sha256: str = ""  # of the member list that binds the run's rounds; empty without one
    is_secure: bool = False  # whether updates are masked
    is_private: bool = False  # whether clients add noise

    def __post_init__(self) -> None:
        require_slug(self.name, "name")
        _require_seconds(self.created_at, "created_at")
        for what in ("rounds", "minimum", "n_values"):
            if not 0 <= getattr(self, what) <= EXACT_MAX:
                raise ValueError(f"{what} must lie between 0 and {EXACT_MAX}")
        for what in ("model_sha256", "run_file_sha256"):
            require_sha256(getattr(self, what), what)
        if self.members_sha256:
            require_sha256(self.members_sha256, "members_sha256")

    @property
    def identity(self) -> str:
        """SHA-256, hex, of what a site decides about: another run of this name, or other terms of it, have another."""
        content = (self.name, self.run_file_sha256, self.model_sha256, self.members_sha256)
        terms = (str(self.is_secure), str(self.minimum), str(self.is_private))
        return hashlib.sha256("\n".join(("umbel run 2", *content, *terms)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class OpenRuns:
    """GET /v1/runs: a page of the runs that are open to this client, sorted by name.

    Held open for up to `wait_s` while `mark` is that of the request.
    """

    runs: tuple[OpenRun, ...]
    mark: str  # changes whenever any of these runs does, on whichever page
    next: str = ""  # the last name of this page, for `after` of the next one; empty on the last page
    retry_after_s: float = 0.0  # how long to wait before the next request

    def __post_init__(self) -> None:
        if len(self.runs) > OPEN_RUNS_PAGE_MAX:
            raise ValueError(f"a page has at most {OPEN_RUNS_PAGE_MAX} runs, not {len(self.runs)}")
        if not len(self.mark) <= MARK_CHARS_MAX:
            raise ValueError(f"mark must have at most {MARK_CHARS_MAX} characters")
        if self.next:
            require_slug(self.next, "next")
        _require_seconds(self.retry_after_s, "retry_after_s")


class AssignmentState(StrEnum):
    """`open`: the round still wants this report. `closed`: it does not; stop and check in again."""

    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class AssignmentStatus:
    """GET /v1/assignments/{id}: held open for `wait_s` seconds, answered at once when the round closes."""

    state: AssignmentState
    reason: str
    window_s: float

    def __post_init__(self) -> None:
        _require_seconds(self.window_s, "window_s")


@dataclass(frozen=True, slots=True)
class AssignmentCounts:
    """GET /v1/assignments/{id}/counts."""

    counts: bool  # whether the run's newest model has the work of this assignment in it


class Outcome(StrEnum):
    """What became of a report."""

    ACCEPTED = "accepted"
    SURPLUS = "surplus"
    LATE = "late"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """PUT /v1/assignments/{id}/report is answered after the report is durable; a repeat gets the same answer."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Decline:
    """PUT /v1/assignments/{id}/decline: this client will not report, or not sign a sum, and why."""

    reason: str

    def __post_init__(self) -> None:
        require_reason(self.reason)


@dataclass(frozen=True, slots=True)
class NotComing:
    """PUT /v1/runs/{run}/not-coming: why this client does not check in for a run that is open to it.

    `may_come`: it may still come, for instance once a person at its site has decided.
    """

    reason: str
    may_come: bool

    def __post_init__(self) -> None:
        require_reason(self.reason)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem document (RFC 9457). `type` is `urn:umbel:problem:<kind>`; `detail` says what to do.

    `tensors`: only with `wrong-layout`, for a run whose file says what of the model travels.
    """

    type: str
    title: str
    status: int
    detail: str
    tensors: TensorRules | None = later(None)


def require_labels(labels: Mapping[str, str]) -> None:
    """Raise `ValueError` for more than 16, or for one that is no slug=slug."""
    if len(labels) > LABELS_MAX:
        raise ValueError(f"at most {LABELS_MAX} labels")
    for key, value in labels.items():
        require_slug(key, "a label's name")
        require_slug(value, "a label's value")


def require_reason(reason: str) -> None:
    """Raise `ValueError` for an empty or too long reason, and for a NUL, which databases do not store."""
    if not 1 <= len(reason) <= REASON_CHARS_MAX:
        raise ValueError(f"reason must have 1 to {REASON_CHARS_MAX} characters")
    if "\x00" in reason:
        raise ValueError("reason must hold no NUL character")


def _require_seconds(value: float, what: str) -> None:
    """Raise `ValueError` for a number of seconds that is negative or not finite."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} must be zero or positive, and finite")
