"""What an ended attempt at a round leaves: a record, often a model, and the next state."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from umbel.aggregation.counts import CountsByName
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelChange, ModelRef
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord, VersionRecord


class Run(Protocol):
    """A run before the ending."""

    @property
    def file(self) -> RunFile: ...
    @property
    def model(self) -> ModelRef: ...
    @property
    def status(self) -> RunStatus: ...
    @property
    def reason(self) -> str: ...


class MadeFile(Protocol):
    @property
    def sha256(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...


class SecureTotals(Protocol):
    """What the sum of a secure round says of its clients' work."""

    @property
    def n_partial(self) -> int: ...
    @property
    def sample_count(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def evaluation(self) -> Mapping[str, float]: ...
    @property
    def counts(self) -> CountsByName: ...  # exact sums of training
    @property
    def evaluation_counts(self) -> CountsByName: ...  # likewise, of held-out data
    @property
    def measured_by(self) -> Mapping[str, int]: ...  # clients, by `training.NAME` and `evaluation.NAME` of a metric
    @property
    def counted_by(self) -> Mapping[str, int]: ...  # likewise, of counts
    @property
    def overfull(self) -> Collection[str]: ...  # "training", "evaluation": more metrics than the sum has room for


class ModelMade(Protocol):
    """The next version of a model, made from a round's sum."""

    @property
    def published(self) -> MadeFile: ...
    @property
    def master_sha256(self) -> str: ...  # the published file's, if that is also the master copy
    @property
    def sum_sha256(self) -> str: ...  # of the exact sum, as in audit bundles
    @property
    def n_values(self) -> int: ...  # of an update
    @property
    def update_rms(self) -> float | None: ...  # the mean of the updates' root mean squares, if the codec measures it
    @property
    def change(self) -> MadeFile | None: ...  # from the version before, if the run makes changes
    @property
    def totals(self) -> SecureTotals | None: ...  # of a secure round
    @property
    def shown(self) -> SumShown | None: ...  # by a secure round's sum, for the next round


@dataclass(frozen=True, slots=True)
class KeptVersion:
    record: VersionRecord
    master_sha256: str  # of the coordinator's full-precision copy


@dataclass(frozen=True, slots=True)
class NewModel:
    """The next version: from a committed round, or a copy of version `rolled_back_to`; see `VersionRecord`."""

    ref: ModelRef
    master_sha256: str
    parent_sha256: str | None
    round: int | None = None
    rolled_back_to: int | None = None
    reason: str = ""
    sample_count: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    sum_sha256: str | None = None  # of the exact sum that it was made from
    update_rms: float | None = None  # likewise
    judged: float | None = None
    change: ModelChange | None = None  # from its parent, if the run makes changes
    shown: SumShown | None = None  # by the sum

    def kept(self, now: float) -> KeptVersion:
        """The version that it becomes. `now`: Unix seconds."""
        record = VersionRecord(
            version=self.ref.version,
            sha256=self.ref.sha256,
            size_bytes=self.ref.size_bytes,
            created_at=now,
            parent_sha256=self.parent_sha256,
            round=self.round,
            rolled_back_to=self.rolled_back_to,
            reason=self.reason,
            sample_count=self.sample_count,
            metrics=self.metrics,
            judged=self.judged,
        )
        return KeptVersion(record, self.master_sha256)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A version was measured on held-out data."""

    version: int
    means: Mapping[str, float]  # over clients, weighted by their sample counts
    judged: float | None = None  # the value for early stopping, if any

    def on(self, kept: KeptVersion) -> KeptVersion:
        """A version after this measurement, which may be of another version."""
        if kept.record.version != self.version:
            return kept
        judged = kept.record.judged if self.judged is None else self.judged
        return replace(kept, record=replace(kept.record, evaluation=self.means, judged=judged))


@dataclass(frozen=True, slots=True)
class RoundEnd:
    record: RoundRecord
    model: NewModel | None
    next_state: Recruiting | None  # None: the run is over
    status: RunStatus
    reason: str
    measured: Measurement | None = None
    deleted: tuple[int, ...] = ()  # versions that are no longer kept
    n_released: int = 0  # sums of a secure run that were revealed, including this one


def versions_after(history: Sequence[KeptVersion], end: RoundEnd, now: float) -> tuple[KeptVersion, ...]:
    """A run's versions after this ending. Empty if `history` is, which then was not looked up. `now`: Unix seconds."""
    if not history:
        return ()
    known = history if end.measured is None else map(end.measured.on, history)
    return tuple(known) if end.model is None else (*known, end.model.kept(now))
