"""An experiment over a recorded fleet, beside the record: the simulation error, and the experiment's own figures.

The error is measured first and separately, by asking the fleet what the recorded clients were asked (`asked_again.py`);
no training is needed, and it takes seconds. If an experiment's model and data mean other work than was recorded, its
rounds are also simulated with the recorded work, to separate the effect of the rounds from that of the work.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.trace import Trace, TracedAttempt
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.federation.rows import Row
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.files import recorded_trace
from umbel.sim.fleet.fleet import Fleet
from umbel.sim.recorded.asked_again import FigureError, NobodyComes, askable, asked_again, compare, with_rounds

ALIKE = 0.02  # relative difference that counts as equal


@dataclass(frozen=True, slots=True)
class Went:
    """One attempt at training with a cohort. `steps`, `update_bytes` and `fetched_bytes` are means over the clients
    that reported; 0 if unknown. `open_s`: how long it was open.
    """

    committed: bool
    window_s: float
    target: int
    over_selection: float
    asked: int
    reports: int
    open_s: float
    bytes_up: int
    bytes_down: int
    steps: float
    update_bytes: float
    fetched_bytes: float

    @classmethod
    def of_row(cls, row: Row) -> "Went":
        return cls(
            committed=row.committed,
            window_s=row.window_s,
            target=row.target,
            over_selection=row.over_selection,
            asked=row.selected,
            reports=row.reported,
            open_s=row.virtual_s,
            bytes_up=row.bytes_up,
            bytes_down=row.bytes_down,
            steps=row.steps_asked,
            update_bytes=row.update_bytes,
            fetched_bytes=row.fetched_bytes,
        )

    @classmethod
    def of_traced(cls, attempt: TracedAttempt) -> "Went":
        reports = attempt.in_time
        n = max(1, len(reports))
        return cls(
            committed=attempt.committed,
            window_s=attempt.window_s,
            target=attempt.reports_wanted or 0,
            over_selection=attempt.over_selection,
            asked=len(attempt.clients),
            reports=len(reports),
            open_s=attempt.open_s,
            bytes_up=attempt.bytes_up,
            bytes_down=attempt.bytes_down,
            steps=sum(one.steps_planned for one in reports) / n,
            update_bytes=sum(one.bytes_up for one in reports) / n,
            fetched_bytes=sum(one.bytes_down for one in reports) / n,
        )


def went_in(rows: Sequence[Row]) -> list[Went]:
    """The attempts of a simulated run that a trace would contain."""
    return [Went.of_row(row) for row in rows if row.task == Task.TRAINING.value and row.selected]


@dataclass(frozen=True, slots=True)
class Course:
    """What attempts asked, and how they went.

    `clients`: of the fleet. `window_s` to `fetched_bytes`: medians over attempts, 0 if unknown. `committed`: share of
    attempts. `asked`, `reports`, `open_s`: means over attempts. `open_h` (hours of open windows) and bytes both ways:
    for each committed round, abandoned attempts included; None if no round was committed.
    """

    label: str
    attempts: int
    clients: int
    window_s: float
    target: float
    over_selection: float
    steps: float
    update_bytes: float
    fetched_bytes: float
    committed: float
    asked: float
    reports: float
    open_s: float
    open_h: float | None
    bytes_up: float | None
    bytes_down: float | None

    @classmethod
    def of(cls, label: str, clients: int, attempts: Sequence[Went]) -> "Course | None":
        """None without attempts."""
        if not attempts:
            return None
        n_committed = sum(one.committed for one in attempts)

        def a_round(values: Iterator[float]) -> float | None:
            return sum(values) / n_committed if n_committed else None

        return cls(
            label=label,
            attempts=len(attempts),
            clients=clients,
            window_s=_median(one.window_s for one in attempts),
            target=_median(one.target for one in attempts),
            over_selection=_median(one.over_selection for one in attempts),
            steps=_median(one.steps for one in attempts if one.steps),
            update_bytes=_median(one.update_bytes for one in attempts if one.update_bytes),
            fetched_bytes=_median(one.fetched_bytes for one in attempts if one.fetched_bytes),
            committed=n_committed / len(attempts),
            asked=sum(one.asked for one in attempts) / len(attempts),
            reports=sum(one.reports for one in attempts) / len(attempts),
            open_s=sum(one.open_s for one in attempts) / len(attempts),
            open_h=a_round(one.open_s / 3600 for one in attempts),
            bytes_up=a_round(float(one.bytes_up) for one in attempts),
            bytes_down=a_round(float(one.bytes_down) for one in attempts),
        )

    @classmethod
    def of_traces(cls, label: str, traces: Sequence[Trace], clients: int | None = None) -> "Course":
        """Of traces of the same fleet. `clients`: of the fleet, if traces do not mention all."""
        attempts = [Went.of_traced(one) for trace in traces for one in trace.attempts]
        found = cls.of(label, clients or traces[0].clients, attempts)
        assert found is not None, "a trace has attempts"
        return found

    def unlike(self, recorded: "Course") -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Differences from the record in words: of the rounds, and of the fleet and its work. Only known values that
        differ by more than 2 % count.
        """
        return self._unlike(recorded, _ROUNDS), self._unlike(recorded, _WORK)

    def _unlike(self, recorded: "Course", question: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
        pairs = [(name, getattr(self, key), getattr(recorded, key), form) for name, key, form in question]
        return tuple(
            f"{name} {form.format(here)}, not {form.format(there)}"
            for name, here, there, form in pairs
            if here and there and abs(here - there) > ALIKE * there
        )


_ROUNDS = (
    ("window_s", "window_s", "{:g}"),
    ("target", "target", "{:g}"),
    ("over_selection", "over_selection", "{:.3g}"),
)
_WORK = (
    ("clients", "clients", "{:,.0f}"),
    ("steps a client", "steps", "{:,.4g}"),
    ("bytes of an update", "update_bytes", "{:,.0f}"),
    ("bytes that a client fetches", "fetched_bytes", "{:,.0f}"),
)


def _median(values: Iterator[float]) -> float:
    """0 without values."""
    found = list(values)
    return float(np.median(found)) if found else 0.0


SEEDS_MAX = 3  # of the experiment, with which the fleet is asked again
POINTS_MAX = 12  # of the experiment, simulated with the recorded work
RECORDED, AGAIN = "recorded", "the same, simulated"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A trace, and its fleets asked again; none if the trace does not say when its attempts were to close."""

    file: str  # of the trace, as the experiment names it
    recorded: Trace = field(repr=False)
    fleets: Mapping[int, Fleet] = field(repr=False)  # by seed
    again: tuple[Trace, ...] = field(repr=False)  # the recorded attempts, simulated with each fleet

    @property
    def errors(self) -> tuple[FigureError, ...]:
        return compare(self.recorded, self.again)

    @property
    def courses(self) -> tuple[Course, ...]:
        """The recorded course, and the same simulated."""
        return (Course.of_traces(RECORDED, [self.recorded]), *([self._course(AGAIN, self.again)] if self.again else []))

    def of_rounds(self, label: str, run: RunFile) -> Course | None:
        """The recorded work in the rounds of this file. None if these change over time or need more clients."""
        if not self.fleets or run.rounds.self_tuning or run.override:
            return None
        trace = with_rounds(self.recorded, run.rounds)
        try:
            return self._course(label, [asked_again(trace, fleet, seed) for seed, fleet in self.fleets.items()])
        except NobodyComes:
            return None

    def _course(self, label: str, traces: Sequence[Trace]) -> Course:
        return Course.of_traces(label, traces, self.recorded.clients)

    @property
    def is_secure(self) -> bool:
        """Whether only the total time of each client's work is known."""
        return all(attempt.secure for attempt in self.recorded.attempts)


def calibrate(trials: Sequence[TrialSpec], folder: Path) -> tuple[Calibration, ...]:
    """One for each trace that these runs name, in their order, relative to `folder`.

    Raises `ValueError`, with a sentence, for a file that is no trace or makes no fleet.
    """
    return tuple(_calibrate(file, group, folder) for file, group in _by_file(trials).items())


def _by_file(trials: Sequence[TrialSpec]) -> dict[str, list[TrialSpec]]:
    groups = dict[str, list[TrialSpec]]()
    for trial in trials:
        if trial.fleet is not None and trial.fleet.recorded is not None:
            groups.setdefault(trial.fleet.recorded, []).append(trial)
    return groups


def _calibrate(file: str, trials: Sequence[TrialSpec], folder: Path) -> Calibration:
    trace = recorded_trace(file, folder)
    known = askable(trace)
    if known is None:
        return Calibration(file, trace, {}, ())
    first_of_seed = {trial.seed: trial for trial in reversed(trials)}
    try:
        fleets = {
            seed: build_fleet(section, seed, folder)
            for seed in sorted(first_of_seed)[:SEEDS_MAX]
            if (section := first_of_seed[seed].fleet) is not None
        }
        again = tuple(asked_again(known, fleet, seed) for seed, fleet in fleets.items())
    except ValueError as error:
        raise ValueError(f"{folder / file}: {error}") from error
    return Calibration(file, known, fleets, again)


@dataclass(frozen=True, slots=True)
class PointAgainst:
    """A point of an experiment beside the record."""

    course: Course
    unlike: tuple[str, ...]  # differences of its rounds from the record, in words
    work_unlike: tuple[str, ...]  # differences of its fleet and work
    recorded_work: Course | None  # its rounds with the recorded work, if both differ (`Calibration.of_rounds`)


@dataclass(frozen=True, slots=True)
class AgainstTrace:
    """A calibration, and the experiment's points with the same trace."""

    calibration: Calibration
    points: tuple[PointAgainst, ...]

    @property
    def errors(self) -> tuple[FigureError, ...]:
        return self.calibration.errors

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds of it."""
        return {
            "trace": self.calibration.file,
            "errors": [asdict(one) | {"relative": one.relative} for one in self.errors],
            "courses": [asdict(one) for one in self.calibration.courses],
            "points": [asdict(one) for one in self.points],
        }


def against(calibration: Calibration, by_point: Mapping[str, Sequence[TrialResult]]) -> AgainstTrace:
    """The experiment's points that use this trace, beside it."""
    recorded, points = calibration.courses[0], list[PointAgainst]()
    for label, runs in by_point.items():
        fleet = runs[0].trial.fleet
        if fleet is None or fleet.recorded != calibration.file:
            continue
        name, attempts = label or "the experiment", [one for run in runs for one in went_in(run.rows)]
        if (course := Course.of(name, runs[0].n_clients, attempts)) is None:
            continue
        unlike, work_unlike = course.unlike(recorded)
        same_work = None
        if work_unlike and unlike and len(points) < POINTS_MAX:
            same_work = calibration.of_rounds(f"{name}, with the recorded work", runs[0].trial.run)
        points.append(PointAgainst(course, unlike, work_unlike, same_work))
    return AgainstTrace(calibration, tuple(points))
