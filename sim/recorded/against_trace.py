"""An experiment over a recorded fleet, beside the record: how far the simulation is off, and what the experiment says.

How far off it is can only be told where the fleet is asked what was asked then (`asked_again.py`), whatever else the
experiment asks. That comes first and by itself; nobody trains for it, and it takes seconds. An experiment's own model
and data may be more or less work than was recorded: where they are, the fleet is also asked for the recorded work by
the experiment's rounds, so that what the rounds change can be told from what the work does.
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

SEEDS_MAX = 3  # of the experiment's, for which the fleet is asked again
POINTS_MAX = 12  # of the experiment's, whose rounds the fleet is asked for the recorded work in
RECORDED, AGAIN = "recorded", "the same, simulated"


@dataclass(frozen=True, slots=True)
class Calibration:
    """`file`: of the trace, as the experiment names it. `fleets`: made of it, by seed; `again`: what each
    of them makes of the attempts in `recorded`. None of either where the trace does not say when these were to close.
    """

    file: str
    recorded: Trace = field(repr=False)
    fleets: Mapping[int, Fleet] = field(repr=False)
    again: tuple[Trace, ...] = field(repr=False)

    @property
    def errors(self) -> tuple[FigureError, ...]:
        return compare(self.recorded, self.again)

    @property
    def courses(self) -> tuple[Course, ...]:
        """As it was recorded, and the same simulated."""
        return (Course.of_traces(RECORDED, [self.recorded]), *([self._course(AGAIN, self.again)] if self.again else []))

    def of_rounds(self, label: str, run: RunFile) -> Course | None:
        """The recorded work in rounds as this file's. None where these are not the same all the time, or where the
        recorded clients are too few for them.
        """
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
        """Whether nothing is known of what takes whom how long but the whole."""
        return all(attempt.secure for attempt in self.recorded.attempts)


def calibrate(trials: Sequence[TrialSpec], folder: Path) -> tuple[Calibration, ...]:
    """One for each trace that these runs name, in their order. `folder`: to which its path is relative.

    Raises `ValueError`, with a sentence, for a file that is no trace or of which no fleet can be made.
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
    """A point of an experiment beside the record. `unlike`: what of its rounds was not so then, `work_unlike`: what of
    its fleet and their work, in words. `recorded_work`: where there is something of both, its rounds with the recorded
    work; None if these rounds are not alike all the time, need more clients than were recorded, or come after the first
    points of a large sweep.
    """

    course: Course
    unlike: tuple[str, ...]
    work_unlike: tuple[str, ...]
    recorded_work: Course | None


@dataclass(frozen=True, slots=True)
class AgainstTrace:
    """A calibration, and the points of the experiment whose fleet is made of the same trace."""

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
    """The points of the experiment beside the trace that their fleet is made of."""
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
