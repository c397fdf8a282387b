"""What is told about rounds and runs, to people and to `rounds.jsonl`: alike in production and simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.round import Task
from umbel.aggregation.privacy.rounds import PrivacySpent
from umbel.aggregation.round.coverage import Gap

EVALUATION = "evaluation."  # the metrics of held-out data, by which a run may end early, begin with this


class Fate(StrEnum):
    """What became of one client of a cohort.

    `training`: the window is open and it has not reported; `accepted`: all its steps count; `partial`: fewer than
    planned, and they count; `released`: told to stop, its work was not needed or came too late; `declined`: it said so
    itself; `lost`: it fell silent; `unfit`: it reported, and did not pass a canary's checks.
    """

    TRAINING = "training"
    ACCEPTED = "accepted"
    PARTIAL = "partial"
    RELEASED = "released"
    DECLINED = "declined"
    LOST = "lost"
    UNFIT = "unfit"


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """One client in one round. `report_s`: seconds from the round's opening to its report, None without one.

    `silent_s`: seconds since the coordinator last heard of it. Bytes are those of model and update bodies, and of a
    secure round's messages. `sample_count`: of its report, else what it announced. `tier`: its label of that name, or
    empty. `train_s`, `upload_bytes_per_s`: how long it says that it has trained, and how fast its update went; None
    where it does not.
    """

    client: str
    fate: Fate
    reason: str
    sample_count: int
    steps_done: int = 0
    steps_planned: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    report_s: float | None = None
    silent_s: float = 0.0
    tier: str = ""
    train_s: float | None = None
    upload_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class AbsentClient:
    """One that was here lately, with `sample_count` samples then; last heard of at `heard_at`, in Unix seconds."""

    client: str
    sample_count: int
    heard_at: float


@dataclass(frozen=True, slots=True)
class Absent:
    """Who of a run's clients was not there to be asked when a round opened, of those that checked in within a day.

    `clients`, `samples`: how many, and what they announced then; `named`: some of them, sites that coverage names
    first, then those with the most samples.
    """

    clients: int
    samples: int
    named: tuple[AbsentClient, ...] = ()

    def samples_of(self, client: str) -> int:
        """What a named one announced; 0 of others."""
        return next((one.sample_count for one in self.named if one.client == client), 0)


@dataclass(frozen=True, slots=True)
class Judged:
    """What counts of the metric of early stopping: not the means, which one client can set (`robust_mean.py`).

    `value`: None where fewer clients measured it than the run file wants; `why`: how it was made, or why it is none.
    """

    metric: str
    value: float | None
    clients: int
    why: str

    @property
    def is_of_evaluation(self) -> bool:
        """Whether it was measured on held-out data, of the model that the round's clients were given."""
        return self.metric.startswith(EVALUATION)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One ended attempt at a round. `model_sha256` is None and `committed` false for an abandoned one.

    `selected`, `reported`, `partial`, `dropped` count clients: `dropped` are the selected that did not report in time
    (lost, declined or released). `evaluation` and `metrics`: means over clients, weighted by their sample counts.

    How much data that was, in samples as announced when the cohort was drawn: `samples_selected` of the whole cohort,
    `samples_in` of those that reported in time, `samples_left_out` of the others, `samples_share` in of selected;
    `passed_over` clients with `samples_passed_over` waited and were not drawn. `uncovered`: what coverage in the run
    file asks for and did not get. `open_s`: from the opening to the last moment at which a report counted. `window_s`,
    `over_selection`, `target`, `minimum`: as they were for this attempt; the last two are 0 in records from before they
    were kept. `tuned`: why the first two are not the run file's, empty if they are. `model_bytes`: of the model that
    was sent out.

    `task`: a round of evaluation makes no model; `model_version` and `model_sha256` are then of the one it measured. A
    canary makes none either; `committed`: whether enough clients passed, whose `reason`s say what was measured.
    `rolled_back_to`: the version from which the run goes on, where a rollback ended this attempt; `model_version` is
    then the new version, a copy of that one. `judged`: where it measured the metric by which the run may end early.
    `away_s`: seconds of `open_s` in which no coordinator could take reports, which the window did not count. `codec`:
    how updates were written, in words. `secure`: whether they were masked, so that of its
    clients' work only sums are known. `epsilon`: of a private run, what it has cost with this attempt. `absent`: who
    was not there to be asked; None where that is not known, as of large fleets, which are sent away.
    """

    run: str
    round: int
    attempt: int
    committed: bool
    reason: str
    model_version: int
    model_sha256: str | None
    opened_at: float
    wall_s: float
    selected: int
    reported: int
    partial: int
    dropped: int
    sample_count: int
    bytes_up: int
    bytes_down: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])
    clients: tuple[ClientRecord, ...] = ()
    samples_selected: int = 0
    samples_in: int = 0
    samples_left_out: int = 0
    samples_share: float = 0.0
    passed_over: int = 0
    samples_passed_over: int = 0
    uncovered: tuple[Gap, ...] = ()
    open_s: float = 0.0
    window_s: float = 0.0
    over_selection: float = 0.0
    tuned: str = ""
    model_bytes: int = 0
    task: Task = Task.TRAINING
    rolled_back_to: int | None = None
    judged: Judged | None = None
    away_s: float = 0.0
    absent: Absent | None = None
    codec: str = ""
    secure: bool = False
    epsilon: float | None = None
    target: int = 0
    minimum: int = 0

    @property
    def share_of_known(self) -> float:
        """How much of all data that is known of was in, 0 to 1: of those asked, those not drawn and those absent."""
        known = self.samples_selected + self.samples_passed_over + (self.absent.samples if self.absent else 0)
        return self.samples_in / known if known else 0.0


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One model version of a run.

    `round`: the one that made it, over `sample_count` samples, with `metrics` as means over its local training; None
    for version 0 and for a rollback's copy of version `rolled_back_to`. `parent_sha256`: of the version before it.
    `evaluation`: means over held-out samples, of this very version, where it was measured. `judged`: its value by the
    metric of early stopping, where enough clients measured it. `deleted_at`: since when it cannot be had any more, in
    Unix seconds as `created_at`; `reason`: how it came to be, in words. `is_best`: of all of them, by the run file's
    `[stop]`, as far as they were measured. `master_sha256`: of the coordinator's full-precision copy.
    """

    version: int
    sha256: str
    size_bytes: int
    created_at: float
    parent_sha256: str | None = None
    round: int | None = None
    rolled_back_to: int | None = None
    reason: str = ""
    sample_count: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])
    judged: float | None = None
    deleted_at: float | None = None
    is_best: bool = False
    master_sha256: str = ""


@dataclass(frozen=True, slots=True)
class LiveRound:
    """The round that is under way. `why`: what it is waiting for, in words; `closes_in_s`: None while recruiting.

    `absent`: who was not there to be asked when it opened; None before, or where it is not known.
    """

    round: int
    attempt: int
    phase: str
    why: str
    waiting: int
    target: int
    closes_in_s: float | None
    clients: tuple[ClientRecord, ...] = ()
    task: Task = Task.TRAINING
    absent: Absent | None = None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at a glance. `rounds_done`: committed rounds; `model`: the newest version.

    `audit_head`: the hash of its newest audit bundle. Whoever notes it can tell later whether bundles were taken away.
    `privacy`: of a private run. `members_sha256`: of the member list that its file binds it to; empty without one.
    """

    name: str
    status: RunStatus
    reason: str
    rounds_done: int
    rounds_planned: int
    created_at: float
    model: ModelRef
    audit_head: str = ""
    privacy: PrivacySpent | None = None
    members_sha256: str = ""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A client that was refused at its check-in, last `at` (Unix seconds), and has not been let in since."""

    client: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RunProgress:
    """GET /v1/admin/runs/{run}/progress?after=N&wait_s=S&mark=M: ended attempts from the N-th on, and the round under
    way.

    `next_after`, `mark`: what to pass as `after` and `mark` next time. `turned_away`: the newest.
    """

    run: RunView
    ended: tuple[RoundRecord, ...]
    next_after: int
    live: LiveRound | None
    turned_away: tuple[TurnedAway, ...] = ()
    mark: str = ""
