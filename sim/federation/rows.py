"""A line of `rounds.jsonl`: one ended attempt of a simulated run, in numbers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import RoundRecord
from umbel.sim.federation.measures import Measured
from umbel.sim.federation.window import DeviceTime

REASONS_MAX = 5  # for which clients declined, in one row or one point


@dataclass(frozen=True, slots=True)
class Row:
    """One ended attempt. Values that were not measured are None."""

    round: int
    attempt: int
    task: str
    committed: bool
    reason: str
    model_version: int
    model_sha256: str | None
    accuracy: float | None  # of the model on the test set
    loss: float | None  # of the model on the test set
    train_loss: float | None  # the mean of the clients' training losses
    selected: int
    reported: int
    partial: int
    dropped: int
    sample_count: int
    bytes_up: int
    bytes_down: int
    wall_s: float  # real seconds
    virtual_s: float  # from the opening of the attempt to its end
    now_s: float  # from the start of the run to the end of the attempt
    window_s: float
    busy_s: float = 0.0  # how long all devices together were at work
    wasted_s: float = 0.0  # of that, work that was late, lost, or no longer needed
    evaluation: dict[str, float] = field(default_factory=dict[str, float])  # what clients measured of the old model
    target: int = 0
    over_selection: float = 0.0
    steps_asked: float = 0.0  # this and the next two: means over the clients that reported; 0 if none did
    update_bytes: float = 0.0
    fetched_bytes: float = 0.0
    epsilon: float | None = None  # the privacy cost so far, of a private run
    samples_in: int = 0  # announced by the clients that reported in time; this and the next three as in a record
    samples_left_out: int = 0
    passed_over: int = 0
    samples_passed_over: int = 0
    train_loss_all: float | None = None  # this and the following as in `Measured`, where [measure] asks for them
    groups_accuracy: float | None = None
    groups_accuracy_least: float | None = None
    groups_loss: float | None = None
    groups_quantiles: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    update_norm: float | None = None
    update_norm_deviation: float | None = None
    update_spread: float | None = None
    update_cosine: float | None = None
    update_dissimilarity: float | None = None
    clients: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    test_metrics: dict[str, float] = field(default_factory=dict[str, float])  # of the model, `accuracy`, `loss` and all
    train_metrics: dict[str, float] = field(default_factory=dict[str, float])  # means of what clients measured training
    counts: dict[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])  # exact sums, of training
    evaluation_counts: dict[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])  # of held-out data
    declined: int = 0  # clients that declined, or would have if the attempt had lasted
    declined_for: dict[str, int] = field(default_factory=dict[str, int])  # the most frequent reasons, with numbers
    proximal_mu: float | None = None  # FedProx's, where it adapts to the training loss
    work_share: float | None = None  # the steps that were done, of those that clients were asked for, as in a record
    # How `train_metrics` and `evaluation` differ between clients, as in a record; for each metric the fields of
    # `Quantiles`.
    train_quantiles: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    evaluation_quantiles: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def makes_model(self) -> bool:
        """Whether it is a round of training that was committed."""
        return self.committed and Task(self.task).makes_model

    @classmethod
    def of(
        cls,
        record: RoundRecord,
        scores: dict[str, float] | None,
        wall_s: float,
        now_s: float,
        device_time: DeviceTime,
        measured: Measured | None = None,
        declines: Iterable[str] = (),
    ) -> "Row":
        """`scores`: of the model. `declines`: why clients declined, a reason for each of them.

        Clients that report no `accuracy` may report the counts `confusion`, from which one follows.
        """
        found, reasons = scores or {}, Counter(declines)
        reports = [one for one in record.clients if one.report_s is not None]
        counted_s = device_time.accepted_s if record.committed else 0.0
        return cls(
            round=record.round,
            attempt=record.attempt,
            task=record.task.value,
            committed=record.committed,
            reason=record.reason,
            model_version=record.model_version,
            model_sha256=record.model_sha256,
            accuracy=found.get("accuracy", found.get("confusion.accuracy")),
            loss=found.get("loss"),
            train_loss=record.metrics.get("loss"),
            selected=record.selected,
            reported=record.reported,
            partial=record.partial,
            dropped=record.dropped,
            sample_count=record.sample_count,
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down,
            wall_s=round(wall_s, 6),
            virtual_s=round(record.wall_s, 6),
            now_s=round(now_s, 6),
            window_s=record.window_s,
            busy_s=round(device_time.busy_s, 6),
            wasted_s=round(device_time.busy_s - counted_s, 6),
            evaluation=dict(record.evaluation),
            target=record.target,
            over_selection=record.over_selection,
            steps_asked=_mean(one.steps_planned for one in reports),
            update_bytes=_mean(one.bytes_up for one in reports),
            fetched_bytes=_mean(one.bytes_down for one in reports),
            epsilon=record.epsilon,
            samples_in=record.samples_in,
            samples_left_out=record.samples_left_out,
            passed_over=record.passed_over,
            samples_passed_over=record.samples_passed_over,
            counts=dict(record.counts),
            evaluation_counts=dict(record.evaluation_counts),
            **asdict(measured or Measured()),
            test_metrics=dict(found),
            train_metrics=dict(record.metrics),
            declined=reasons.total(),
            declined_for=dict(reasons.most_common(REASONS_MAX)),
            proximal_mu=record.proximal_mu,
            work_share=record.work_share,
            train_quantiles={name: asdict(one) for name, one in record.metric_quantiles.items()},
            evaluation_quantiles={name: asdict(one) for name, one in record.evaluation_quantiles.items()},
        )


def _mean(values: Iterable[int]) -> float:
    """0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def row_of(line: dict[str, Any]) -> Row:
    """A row from its JSON object."""
    return Row(**line)
