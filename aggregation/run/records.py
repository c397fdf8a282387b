"""The records of rounds and runs, for people and for `rounds.jsonl`: the same in production and simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from umbel.aggregation.canonical import later
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.round import Task
from umbel.aggregation.privacy.section import PrivacySpent
from umbel.aggregation.round.coverage import Gap
from umbel.aggregation.run.quantiles import Quantiles

EVALUATION = "evaluation."  # the prefix of metrics of held-out data


class Fate(StrEnum):
    """The outcome of one client of a cohort."""

    TRAINING = "training"  # the window is open, and it has not reported
    ACCEPTED = "accepted"  # all its steps count
    PARTIAL = "partial"  # fewer steps than planned, and they count
    RELEASED = "released"  # told to stop: its work was not needed, or came too late
    DECLINED = "declined"
    LOST = "lost"  # it fell silent
    UNFIT = "unfit"  # it reported, and did not pass a canary's checks


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """One client in one round."""

    client: str
    fate: Fate
    reason: str
    sample_count: int  # of its report; without one, what it announced
    steps_done: int = 0
    steps_planned: int = 0
    bytes_up: int = 0  # of update bodies and of a secure round's messages
    bytes_down: int = 0  # of model bodies and of a secure round's messages
    report_s: float | None = None  # seconds from the round's opening to its report; None without one
    silent_s: float = 0.0  # seconds since its last request
    tier: str = ""  # its label `tier`, or empty
    train_s: float | None = None  # as it reported; None if it did not
    upload_bytes_per_s: float | None = None  # likewise
    metrics: Mapping[str, float] = later(factory=dict[str, float])  # its own, if the run file has per_site_metrics
    evaluation: Mapping[str, float] = later(factory=dict[str, float])  # likewise


@dataclass(frozen=True, slots=True)
class AbsentClient:
    """A client that checked in within a day, and was not waiting when a round opened."""

    client: str
    sample_count: int  # that it announced
    heard_at: float  # its last request, in Unix seconds


@dataclass(frozen=True, slots=True)
class Absent:
    """The clients that checked in within a day and were not waiting when a round opened."""

    clients: int
    samples: int  # that they announced
    named: tuple[AbsentClient, ...] = ()  # some of them: first sites that coverage names, then those with most samples

    def samples_of(self, client: str) -> int:
        """The samples that a client in `named` announced; 0 for others."""
        return next((one.sample_count for one in self.named if one.client == client), 0)


@dataclass(frozen=True, slots=True)
class Judged:
    """A round's value of the metric of early stopping: a robust mean, which one client cannot set (`stopping.py`)."""

    metric: str
    value: float | None  # None if fewer clients measured it than the run file asks
    clients: int  # that measured it
    why: str  # how the value was made, or why there is none

    @property
    def is_of_evaluation(self) -> bool:
        """Whether it was measured on held-out data, for the model that the round's clients received."""
        return self.metric.startswith(EVALUATION)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One ended attempt at a round, of any kind (`task`).

    Samples are counted as clients announced them when the cohort was drawn, except for `sample_count`.
    """

    run: str
    round: int
    attempt: int
    committed: bool  # of a canary: whether enough clients passed
    reason: str
    model_version: int  # the version that it made; if it made none, the one that it began with
    model_sha256: str | None  # of that version; None if the attempt was abandoned
    opened_at: float  # Unix seconds
    wall_s: float
    selected: int  # clients in the cohort
    reported: int
    partial: int  # of those that reported
    dropped: int  # that did not report in time: lost, declined or released
    sample_count: int  # in the reports
    bytes_up: int
    bytes_down: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # means and figures (`derived_metrics.py`)
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])  # likewise
    clients: tuple[ClientRecord, ...] = ()
    samples_selected: int = 0  # of the whole cohort
    samples_in: int = 0  # of those that reported in time
    samples_left_out: int = 0  # of the others
    samples_share: float = 0.0  # `samples_in` of `samples_selected`
    passed_over: int = 0  # clients that waited and were not drawn
    samples_passed_over: int = 0
    uncovered: tuple[Gap, ...] = ()  # what coverage in the run file asks and did not get
    open_s: float = 0.0  # from the opening to the last moment at which a report counted
    window_s: float = 0.0
    over_selection: float = 0.0
    tuned: str = ""  # why window and over-selection are not the run file's; empty if they are
    model_bytes: int = 0  # of the model that was sent out
    task: Task = Task.TRAINING
    rolled_back_to: int | None = None  # the version that a rollback copied to `model_version`
    judged: Judged | None = None  # if the attempt measured the metric of early stopping
    away_s: float = 0.0  # the part of `open_s` in which no coordinator could take reports; the window excludes it
    absent: Absent | None = None  # None if unknown, as in large fleets, whose clients do not wait
    codec: str = ""  # in words
    secure: bool = False  # whether updates were masked, so that only sums of the clients' work are known
    epsilon: float | None = None  # what a private run has cost, with this attempt
    target: int = 0  # 0 in records from before it was kept
    minimum: int = 0  # likewise
    counts: Mapping[str, tuple[int, ...]] = later(
        factory=dict[str, tuple[int, ...]]
    )  # of the training: exact sums over clients
    evaluation_counts: Mapping[str, tuple[int, ...]] = later(
        factory=dict[str, tuple[int, ...]]
    )  # likewise, of held-out data
    # Why metrics of a masked round are not in it, by `training.NAME` and `evaluation.NAME`; also names of counts, and
    # `training.*` or `evaluation.*` for metrics that the sum has no room for.
    not_shown: Mapping[str, str] = later(factory=dict[str, str])
    proximal_mu: float | None = later(None)  # of a round in which clients trained, where it adapts to the loss
    # How `metrics` and `evaluation` differ between clients; empty in secure rounds, in which nobody knows.
    metric_quantiles: Mapping[str, Quantiles] = later(factory=dict[str, Quantiles])
    evaluation_quantiles: Mapping[str, Quantiles] = later(factory=dict[str, Quantiles])

    @property
    def work_share(self) -> float | None:
        """The share (0 to 1) of the steps that clients were asked for that those in `reported` did. None if it is
        unknown: of a secure round only the number of `partial` clients is known.
        """
        planned = sum(one.steps_planned for one in self.clients)
        return sum(one.steps_done for one in self.clients) / planned if planned else None

    @property
    def share_of_known(self) -> float:
        """`samples_in` as a share (0 to 1) of all known samples: of clients asked, passed over and absent."""
        known = self.samples_selected + self.samples_passed_over + (self.absent.samples if self.absent else 0)
        return self.samples_in / known if known else 0.0


@dataclass(frozen=True, slots=True)
class VersionRecord:
    version: int
    sha256: str
    size_bytes: int
    created_at: float  # Unix seconds
    parent_sha256: str | None = None  # of the version before
    round: int | None = None  # that made it; None for version 0 and for a rollback's copy
    rolled_back_to: int | None = None  # the version that a rollback copied
    reason: str = ""  # why it was made
    sample_count: int = 0  # of the round that made it
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # of that round's training, as in its record
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])  # of held-out samples, likewise
    judged: float | None = None  # its value by the metric of early stopping, if enough clients measured it
    deleted_at: float | None = None  # Unix seconds
    is_best: bool = False  # of all measured versions, by the run file's [stop]
    master_sha256: str = ""  # of the coordinator's full-precision copy


@dataclass(frozen=True, slots=True)
class LiveRound:
    """The round under way."""

    round: int
    attempt: int
    phase: str
    why: str  # what it waits for
    waiting: int  # clients that wait for work
    target: int
    closes_in_s: float | None  # None while recruiting; of a closed secure round: until its sum is given up
    clients: tuple[ClientRecord, ...] = ()
    task: Task = Task.TRAINING
    absent: Absent | None = None  # when it opened; None before, or if unknown


@dataclass(frozen=True, slots=True)
class RunView:
    name: str
    status: RunStatus
    reason: str
    rounds_done: int  # committed
    rounds_planned: int
    created_at: float
    model: ModelRef  # the newest version
    audit_head: str = ""  # of the newest audit bundle: noted elsewhere, it shows later whether bundles are missing
    privacy: PrivacySpent | None = None
    members_sha256: str = ""  # of the member list that the run file names; empty without one


class AwayKind(StrEnum):
    """Who says that a client does not come to a run."""

    TURNED_AWAY = "turned away"  # the coordinator refused its last check-in
    STAYS_AWAY = "stays away"  # the client says that it takes no part
    NOT_READY = "not ready"  # the client says why it does not come yet


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A client that does not come to a run, and why."""

    client: str
    reason: str
    at: float  # Unix seconds
    kind: AwayKind = later(AwayKind.TURNED_AWAY)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """GET /v1/admin/runs/{run}/progress?after=N&wait_s=S&mark=M: ended attempts from the N-th on, and the live one."""

    run: RunView
    ended: tuple[RoundRecord, ...]
    next_after: int  # the next request's `after`
    live: LiveRound | None
    turned_away: tuple[TurnedAway, ...] = ()  # the newest
    mark: str = ""  # the next request's `mark`
