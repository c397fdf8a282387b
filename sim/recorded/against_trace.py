"""An experiment over a recorded fleet, beside the record: the simulation error, and the experiment's own figures.

The error is measured first and separately, by asking the fleet what the recorded clients were asked (`asked_again.py`);
no training is needed, and it takes seconds. If an experiment's model and data mean other work than was recorded, its
rounds are also simulated with the recorded work, to separate the effect of the rounds from that of the work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.trace import Trace
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.files import recorded_trace
from umbel.sim.fleet.fleet import Fleet
from umbel.sim.recorded.asked_again import FigureError, NobodyComes, askable, asked_again, compare, with_rounds
from umbel.sim.recorded.courses import Course, went_in

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
        if trial.fleet.recorded is not None:
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
            seed: build_fleet(first_of_seed[seed].fleet, seed, folder) for seed in sorted(first_of_seed)[:SEEDS_MAX]
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
        if runs[0].trial.fleet.recorded != calibration.file:
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
