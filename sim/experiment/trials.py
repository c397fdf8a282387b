"""One simulated run from its start, or from its checkpoint, to its end; and means over the runs of several seeds."""

import gc
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.run.standing import beginning
from umbel.sim.data.data_set import DataSet
from umbel.sim.engines.choose import AutoClients, AutoEngine
from umbel.sim.experiment.checkpoint import CLIENTS_FOLDER, MODEL_FILE, keeping, read_checkpoint
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.last_model import LastModel
from umbel.sim.experiment.world import TrialWorld, digests_of, make_world
from umbel.sim.federation.federation import Federation, SimulatedAttempt
from umbel.sim.federation.measures import GROUPS_MAX, Measured, group_scores, of_clients, of_model, of_updates
from umbel.sim.federation.rows import Row
from umbel.sim.given import is_given

_NEW_OBJECTS = 200_000  # before a collection: at most some tens of megabytes of garbage


@contextmanager
def seldom_collected() -> Generator[None]:
    """Have the garbage collector skip existing objects inside, and look at new ones seldom."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _scores_by_holder(federation: Federation, made: TrialWorld) -> dict[str, Mapping[str, float]]:
    """The scores of the last model for each natural holder. Own clients give those of the holders that they are."""
    meter, model = made.world.meter, federation.model
    if meter is not None:
        meter.load(model.layout.model.full_state(model.published))
        return group_scores(meter, made.data)
    names = None if made.partition is None else made.partition.names
    if names is None or len(names) > GROUPS_MAX:
        return {}
    return {name: scores for name, scores in zip(names, federation.scores_of_each(), strict=True) if scores}


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A run that is over."""

    trial: TrialSpec
    rows: tuple[Row, ...]
    status: RunStatus  # as a coordinator would show it
    reason: str
    model_sha256: str
    wall_s: float
    engine: str  # which did the work
    engine_why: str  # why "auto" chose it; empty if the file names it
    n_clients: int  # of the population
    model: LastModel = field(repr=False, compare=False)
    # Of the last model, for each natural holder (`_scores_by_holder`).
    groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    @property
    def scored(self) -> list[Row]:
        """The rows of committed rounds after which the model was measured."""
        return [row for row in self.rows if row.accuracy is not None or row.loss is not None]

    @property
    def epsilon(self) -> float | None:
        """The privacy cost of a private run."""
        return self.rows[-1].epsilon if self.rows else None


def run_trial(
    trial: TrialSpec,
    folder: Path | None,
    base: Path,
    data: Path | None,
    tell: Callable[[Row], None] = lambda row: None,
    made: Callable[[TrialWorld], None] = lambda made: None,
    resumes: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> TrialResult:
    """Simulate one run to its end. `folder`: for its files; an existing run there is resumed.

    `base`, `data`: as for `make_world`; `tell` gets each new row, `made` gets the world before the first row, and
    `resumes` gets the rows before a checkpoint. Raises the errors of `make_world`, `SimulationError`, `EngineError`,
    `CheckpointError`.
    """
    began = time.perf_counter()
    world = make_world(trial, base, data)
    try:
        made(world)
        resumed, inputs = None, dict[str, str]()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            inputs = digests_of(trial, world.data, base, data)
            if trial.model is not None and is_given(trial.model.name):
                inputs["first weights of the model"] = world.model.file.sha256
            resumed = read_checkpoint(folder, trial.run, world.model, inputs)
        engine = world.world.worker
        if resumed is not None and isinstance(engine, AutoEngine | AutoClients):
            engine.keep(resumed.engine)
        if resumed is None:
            federation, before_s = Federation(world.world, beginning(trial.run, world.model), world.model), 0.0
        else:
            federation = Federation(world.world, resumed.standing, resumed.model, resumed.memory)
            before_s = resumed.wall_s
        if folder is not None and world.world.clients is not None:
            world.world.clients.keep_states_in(folder / CLIENTS_FOLDER, federation.standing.model.version)
        with keeping(folder, inputs, resumed) as kept:
            if resumed is not None:
                resumes(kept.rows)
            with seldom_collected():
                for row in _rows(federation, trial, world.data, began):
                    kept.add(row)
                    tell(row)
                    kept.save(federation, before_s + time.perf_counter() - began)
            wall_s = before_s + time.perf_counter() - began
            kept.save(federation, wall_s, is_last=True)
            kept.save_model(federation.model)
        standing, model = federation.standing, federation.model
        kept_in = None if folder is None else folder / MODEL_FILE
        return TrialResult(
            trial=trial,
            rows=tuple(kept.rows),
            status=standing.status,
            reason=standing.reason,
            model_sha256=standing.model.sha256,
            wall_s=wall_s,
            engine=kept.engine_of(federation),
            engine_why=kept.why_of(federation),
            n_clients=world.world.population.n_clients,
            model=LastModel.of(standing.model.sha256, model.published, model.layout, kept_in),
            groups=_scores_by_holder(federation, world),
        )
    finally:
        world.world.close()


def _rows(federation: Federation, trial: TrialSpec, data: DataSet | None, began: float) -> Iterator[Row]:
    last = began
    for attempt in federation.attempts():
        scores = federation.scores() if _is_scored(attempt, trial) else None
        measured = _measured(federation, attempt, trial, data, is_scored=scores is not None)
        now = time.perf_counter()
        seconds, declines = (now - last, attempt.standing.now, attempt.device_time), attempt.declines.values()
        row = Row.of(attempt.record, scores, *seconds, measured, declines)
        if trial.stop_at_target is not None and row.accuracy is not None and row.accuracy >= trial.stop_at_target:
            federation.stop(f"the model has the target accuracy of {trial.stop_at_target:g}")
        yield row
        last = now


def _is_scored(attempt: SimulatedAttempt, trial: TrialSpec) -> bool:
    record = attempt.record
    if not (record.committed and record.task.makes_model):
        return False
    return record.round % trial.engine.score_every == 0 or attempt.standing.status.is_over


def _measured(
    federation: Federation, attempt: SimulatedAttempt, trial: TrialSpec, data: DataSet | None, *, is_scored: bool
) -> Measured:
    """What `[measure]` asks of this attempt. With `is_scored`, the meter holds the attempt's model."""
    section, world = trial.measure, federation.world
    meter = world.meter if is_scored else None
    of_this_model = {} if meter is None else of_model(section, meter, world.population, data)
    clients = of_clients(section, attempt.record, attempt.works, attempt.updates)
    updates = of_updates(section, attempt.updates if attempt.record.committed else None)
    return Measured(**of_this_model, **updates, clients=clients)


CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and its 95 % confidence interval (Student's t; Student 1908); None as bounds for one seed."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate | None":
        """None without values."""
        n = len(values)
        if not n:
            return None
        mean = math.fsum(values) / n
        if n == 1:
            return cls(mean, None, None, 1)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
        half = _student_t(n - 1) * deviation / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)


def _student_t(degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, degrees))


class Watcher:
    """Is told of an experiment's progress; this one ignores it."""

    def begins(self, trial: TrialSpec) -> None:
        """A run begins or resumes."""

    def expects(self, trial: TrialSpec, n_rounds: int) -> None:
        """The run of a Flower app says how many rounds it will have; the file does not."""

    def resumes(self, trial: TrialSpec, rows: Sequence[Row]) -> None:
        """The run goes on from a checkpoint, after these rows."""

    def row(self, trial: TrialSpec, row: Row) -> None:
        """An attempt has ended."""

    def ends(self, result: TrialResult) -> None:
        """A run is over."""
