"""What an attempt at a round leaves of a run when it has ended: a record, often a model, and what comes next.

A coordinator stores it, all together; a simulation goes on with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelChange, ModelRef
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord, VersionRecord
from umbel.aggregation.secagg.numbers.totals import Totals


class Run(Protocol):
    """A run as it stands, before the ending: its file, its newest model, and whether it goes on."""

    @property
    def file(self) -> RunFile: ...
    @property
    def model(self) -> ModelRef: ...
    @property
    def status(self) -> RunStatus: ...
    @property
    def reason(self) -> str: ...


class MadeFile(Protocol):
    """Bytes that were made: their SHA-256 in hex, and how many there are."""

    @property
    def sha256(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...


class ModelMade(Protocol):
    """The next version of a model, of `n_values`, made of a round's sum.

    `master_sha256` is the published one's if there is no need of another. `sum_sha256`: of the exact sum, as audit
    bundles have it. `update_rms`: the mean of the updates' root mean squares, where their codec measures it. `change`:
    from the version before it, if the run makes changes. `totals`: of a secure round, what its clients have said
    together; `shown`: what their sum has shown for the next.
    """

    @property
    def published(self) -> MadeFile: ...
    @property
    def master_sha256(self) -> str: ...
    @property
    def sum_sha256(self) -> str: ...
    @property
    def n_values(self) -> int: ...
    @property
    def update_rms(self) -> float | None: ...
    @property
    def change(self) -> MadeFile | None: ...
    @property
    def totals(self) -> Totals | None: ...
    @property
    def shown(self) -> SumShown | None: ...


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A model version. `master_sha256`: of the coordinator's full-precision copy."""

    record: VersionRecord
    master_sha256: str


@dataclass(frozen=True, slots=True)
class NewModel:
    """The next version: a committed round's outcome, or a copy of version `rolled_back_to`; see `VersionRecord`.

    `sum_sha256`, `update_rms`, `shown`: of the exact sum that it was made of. `judged`: as in `VersionRecord`.
    `change`: what makes it of its parent, if the run makes changes.
    """

    ref: ModelRef
    master_sha256: str
    parent_sha256: str | None
    round: int | None = None
    rolled_back_to: int | None = None
    reason: str = ""
    sample_count: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    sum_sha256: str | None = None
    update_rms: float | None = None
    judged: float | None = None
    change: ModelChange | None = None

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

    shown: SumShown | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A version was measured on held-out data; `means`: over clients, weighted by their sample counts.

    `judged`: what counts of it for early stopping; None if nothing does.
    """

    version: int
    means: Mapping[str, float]
    judged: float | None = None

    def on(self, kept: KeptVersion) -> KeptVersion:
        """A version as it is known after this measurement, be it of that version or of another."""
        if kept.record.version != self.version:
            return kept
        judged = kept.record.judged if self.judged is None else self.judged
        return replace(kept, record=replace(kept.record, evaluation=self.means, judged=judged))


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """What ends an attempt: its record, and what comes next (None: the run is over).

    `measured`: what the attempt tells of a version; `deleted`: the versions that are not kept from now on.
    `n_released`: how many sums of a secure run were revealed, with its own.
    """

    record: RoundRecord
    model: NewModel | None
    next_state: Recruiting | None
    status: RunStatus
    reason: str
    measured: Measurement | None = None
    deleted: tuple[int, ...] = ()
    n_released: int = 0


def versions_after(history: Sequence[KeptVersion], end: RoundEnd, now: float) -> tuple[KeptVersion, ...]:
    """A run's versions after this ending, as a coordinator stores them. None if there are none before: then they were
    not looked up. `now`: Unix seconds.
    """
    if not history:
        return ()
    known = history if end.measured is None else map(end.measured.on, history)
    return tuple(known) if end.model is None else (*known, end.model.kept(now))
