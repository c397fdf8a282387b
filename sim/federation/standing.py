"""What a simulated run holds between two attempts: where it stands, its model, and what clients keep; all in memory."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.downlink.change import ChangeWriter
from umbel.aggregation.downlink.publishing import write_next_master
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import HasMean, ServerStep, empty_master, first_master_copy, write_next
from umbel.aggregation.model.state import InMemory, empty_state, torch_dtype, with_first_control
from umbel.aggregation.optimizers.server_optimizer import ServerOptimizer
from umbel.aggregation.optimizers.sgd import sgd
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import Fate, VersionRecord
from umbel.aggregation.run.report_times import Observation, observed
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd, versions_after
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX
from umbel.aggregation.secagg.numbers.totals import Totals
from umbel.aggregation.types import CHANGES_MAX, ClientId
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import Population
from umbel.sim.federation.site_policies import SiteMemory


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The SHA-256 (hex) and the length of a file, which a simulation does not keep."""

    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> "FileDigest":
        return cls(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True, slots=True)
class ModelState:
    """A version of the model."""

    layout: Layout
    master: Mapping[str, Tensor] = field(repr=False)  # in full precision
    published: Mapping[str, Tensor] = field(repr=False)  # what clients start from
    file: FileDigest  # safetensors
    change: FileDigest | None = None  # from the version before, where the run sends changes

    @classmethod
    def first(
        cls, state: Mapping[str, Tensor], layout: Layout | None = None, optimizer: ServerOptimizer | None = None
    ) -> "ModelState":
        """Version 0. `layout`: of the run; by default all of the state travels. `optimizer`: of the server."""
        layout = Layout.of_state(state) if layout is None else layout
        whole = with_first_control(state, layout)
        owned = {spec.name: whole[spec.name].detach().clone() for spec in layout.owners()}
        body = encode_model(layout.full_state(owned), layout)
        return cls(layout, first_master_copy(layout, optimizer or sgd(), owned), owned, FileDigest.of(body))

    def after(self, mean: HasMean, step: ServerStep, change_step: float | None) -> "ModelState":
        """The next version, with the bits of a coordinator's (`server/sums/model_files.py`).

        `change_step`: where clients are sent changes, their step in root mean squares. Raises `ModelOverflow`.
        """
        layout, before = self.layout, InMemory(self.master)
        master = empty_master(layout, step.optimizer)
        if change_step is None:
            public = empty_state(layout, torch_dtype)
            write_next(layout, before, mean, step, InMemory(public), InMemory(master))
            return ModelState(layout, master, public, self._file_of(public))
        public = {name: values.clone() for name, values in self.published.items()}
        files = InMemory(master), InMemory(public)
        writer = ChangeWriter(layout, write_next_master(layout, before, mean, step, *files, change_step), *files)
        body = b"".join(writer.body())
        return ModelState(layout, master, public, self._file_of(public), FileDigest.of(writer.head() + body))

    def _file_of(self, published: Mapping[str, Tensor]) -> FileDigest:
        return FileDigest.of(encode_model(self.layout.full_state(published), self.layout))

    def ref(self, version: int) -> ModelRef:
        return ModelRef(version, self.file.sha256, self.file.size_bytes, self.layout.digest)


@dataclass(frozen=True, slots=True)
class SummedModel:
    """The next model and what the sum that it was made of has shown (`aggregation.run_end.ModelMade`)."""

    state: ModelState
    sum_sha256: str
    update_rms: float | None = None
    totals: Totals | None = None

    @property
    def published(self) -> FileDigest:
        return self.state.file

    @property
    def master_sha256(self) -> str:
        """A simulation keeps no files of master copies."""
        return self.state.file.sha256

    @property
    def n_values(self) -> int:
        return self.state.layout.update.n_values

    @property
    def change(self) -> FileDigest | None:
        return self.state.change

    @property
    def shown(self) -> SumShown | None:
        return None if self.totals is None else self.totals.shown


@dataclass(slots=True)
class Memory:
    """What clients keep from round to round."""

    left: dict[ClientId, Residual] = field(default_factory=dict[ClientId, Residual])  # of error feedback
    has: dict[ClientId, int] = field(default_factory=dict[ClientId, int])  # the version of each client asked so far
    changes: tuple[int, ...] = ()  # bytes of each change that leads to the newest version, the oldest first
    sites: SiteMemory = field(default_factory=SiteMemory)
    kept: dict[ClientId, Tensor] = field(default_factory=dict[ClientId, Tensor])  # for the algorithm (`kept.py`)

    def down_bytes(self, clients: Sequence[ClientId], version: int, model: ModelState) -> Indices:
        """What each fetches to have the newest version: nothing, the changes since its own, or the model."""
        behind = (version - self.has.get(client, -1) for client in clients)
        whole = model.file.size_bytes
        n_known = len(self.changes)
        return np.array([sum(self.changes[n_known - n :]) if n <= n_known else whole for n in behind], dtype=np.int64)

    def fetched(self, clients: Iterable[ClientId], version: int) -> None:
        self.has.update(dict.fromkeys(clients, version))

    def note(self, model: ModelState) -> None:
        """Take a new version. As a coordinator does (`server/store/versions.py`), offer at most eight changes in a row
        that together are smaller than the model.
        """
        made = () if model.change is None else (*self.changes, model.change.size_bytes)[-CHANGES_MAX:]
        while made and sum(made) >= model.file.size_bytes:
            made = made[1:]
        self.changes = made


class SimulationError(Exception):
    """A simulation cannot continue: one sentence that says what to do."""


def require_possible(
    file: RunFile, layout: Layout, population: Population, *, measure_themselves: bool = False
) -> None:
    """Raise `SimulationError`, or `ValueError` for a model that cannot be private.

    `measure_themselves`: whether clients evaluate with their own code, and so say themselves if they have no data.
    """
    if file.privacy is not None:
        require_private_model(layout)
    measures = file.evaluation is not None or file.training.evaluate or any(one.evaluate for one in file.override)
    if measures and not measure_themselves and population.holdout_of(np.zeros(1, dtype=np.int64)) is None:
        raise SimulationError(
            "this run asks clients to measure the model, but they have no held-out data: set holdout = 0.1 in "
            "[partition], or leave out [evaluation] and training.evaluate (the simulator scores the model on the "
            "test set anyway)"
        )
    if file.training.evaluate_after and not measure_themselves:
        raise SimulationError(
            "evaluate_after asks each client to measure the model that it has trained, and only real clients do that: "
            "name an app in [clients], or leave evaluate_after out of [training]"
        )
    for rounds in _rounds_sections(file):
        counts_clients = rounds.weighting is Weighting.SAMPLES  # else the target counts draws
        for name, wanted in (("target", rounds.target if counts_clients else 1), ("minimum", rounds.minimum)):
            if wanted > population.n_clients:
                raise SimulationError(
                    f"rounds.{name} is {wanted:,}, but there are only {counted(population.n_clients, 'client')}: no "
                    f"round could get that many reports; set it to {population.n_clients} at most, or simulate more "
                    "clients"
                )


def _rounds_sections(file: RunFile) -> Iterator[RoundsSection]:
    """The sections from the beginning of each override, and after its end."""
    starts = {1, *(one.first_round for one in file.override), *((one.last_round or 0) + 1 for one in file.override)}
    return (file.rounds_of(number) for number in sorted(starts) if number <= file.rounds.count)


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a run between two attempts (`aggregation.run_end.Run`): all that determines its future but the
    model.
    """

    file: RunFile
    model: ModelRef
    state: Recruiting
    status: RunStatus = RunStatus.RUNNING
    reason: str = ""
    now: float = 0.0  # virtual seconds
    observations: tuple[Observation, ...] = ()  # the newest report times
    history: tuple[KeptVersion, ...] = ()  # of a run that looks back at versions
    update_bytes: int | None = None  # the length of updates in the last round; None before the first

    def after(self, end: RoundEnd, update_bytes: int | None) -> "Standing":
        """The state after this ending. `update_bytes`: the mean length of updates in it; None without any."""
        seen: deque[Observation] = deque(self.observations, maxlen=OBSERVATIONS_MAX)
        if self.file.rounds.self_tuning:
            seen.extend(observed(end.record))
        return replace(
            self,
            model=self.model if end.model is None else end.model.ref,
            state=self.state if end.next_state is None else end.next_state,
            status=end.status,
            reason=f"{end.reason}{_said(end)}" if end.status is RunStatus.FAILED else end.reason,
            now=end.record.opened_at + end.record.wall_s,
            observations=tuple(seen),
            history=versions_after(self.history, end, 0.0),
            update_bytes=update_bytes or self.update_bytes,
        )


def beginning(file: RunFile, model: ModelState) -> Standing:
    """The state before the first attempt."""
    ref = model.ref(0)
    first = VersionRecord(0, ref.sha256, ref.size_bytes, 0.0)
    history = (KeptVersion(first, ref.sha256),) if file.stop is not None else ()
    return Standing(file, ref, Recruiting(file.first_plan(model.layout.update.n_values), since=0.0), history=history)


def _said(end: RoundEnd) -> str:
    """Why clients declined in the last attempt."""
    declined = [one.reason for one in end.record.clients if one.fate is Fate.DECLINED]
    if not declined:
        return ""
    return (
        f"; {len(declined)} of {len(end.record.clients)} have declined the last time, such as for this: {declined[0]}"
    )
