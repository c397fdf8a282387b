"""An operator's orders to a run, and what follows from each. Pure.

A repeated order changes nothing. An order that the run cannot follow is refused, with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.round.states import Closing, Hurried, Recruiting, Resumed, RoundState, Spoiled, Stopped, Training
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.run_end import KeptVersion
from umbel.aggregation.run.stopping import judge
from umbel.server.problems import Refused


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run: a round that has closed still commits, an open one is abandoned."""

    now: float
    reason: str

    @property
    def words(self) -> str:
        return f"stop ({self.reason})"


@dataclass(frozen=True, slots=True)
class Pause:
    """Begin no further round. `at_once`: abandon the open round too."""

    now: float
    reason: str
    at_once: bool

    @property
    def words(self) -> str:
        return f"pause{' at once' if self.at_once else ''} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume a paused run."""

    now: float

    @property
    def words(self) -> str:
        return "resume"


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the round that recruits with the clients that wait, without waiting for others."""

    now: float

    @property
    def words(self) -> str:
        return "start"


@dataclass(frozen=True, slots=True)
class Rollback:
    """Continue from an older version. The open attempt is abandoned."""

    now: float
    to: int | Literal["best"]
    reason: str

    @property
    def words(self) -> str:
        return f"rollback to {self.to if self.to == 'best' else f'version {self.to}'} ({self.reason})"


Order: TypeAlias = Stop | Pause | Resume | Start | Rollback


@dataclass(frozen=True, slots=True)
class Situation:
    """A run at the moment of an order. `history`: its versions, for a rollback."""

    file: RunFile
    status: RunStatus
    state: RoundState
    history: Sequence[KeptVersion] = ()


@dataclass(frozen=True, slots=True)
class Obeyed:
    """What follows from an order: an event for the round, a status for the run, a version to go back to."""

    event: Stopped | Spoiled | Hurried | Resumed | None = None
    status: tuple[RunStatus, str] | None = None
    rolled_back_to: KeptVersion | None = None


UNCHANGED = Obeyed()


def obey(order: Order, run: Situation) -> Obeyed:
    """What follows from the order. Raises `Refused`."""
    match order:
        case Stop(now, reason):
            return UNCHANGED if run.status.is_over else Obeyed(Stopped(now, reason), (RunStatus.STOPPED, reason))
        case Pause():
            return _pause(order, run)
        case Resume(now):
            _refuse_if_over(run, "cannot be resumed")
            return UNCHANGED if run.status is RunStatus.RUNNING else Obeyed(Resumed(now), (RunStatus.RUNNING, ""))
        case Start(now):
            _refuse_if_over(run, "cannot start a round")
            return Obeyed(Hurried(now)) if isinstance(run.state, Recruiting) else UNCHANGED
        case Rollback():
            return _roll_back(order, run)
        case _:
            assert_never(order)


def _pause(order: Pause, run: Situation) -> Obeyed:
    _refuse_if_over(run, "cannot be paused")
    is_cut_short = order.at_once and isinstance(run.state, Training)
    event = Stopped(order.now, f"the run was paused: {order.reason}") if is_cut_short else None
    return Obeyed(event, None if run.status is RunStatus.PAUSED else (RunStatus.PAUSED, order.reason))


def _roll_back(order: Rollback, run: Situation) -> Obeyed:
    _refuse_if_over(run, "cannot be rolled back; export the version and create a run from it")
    target, newest = _target(order.to, run), run.history[-1].record
    if target.record.sha256 == newest.sha256:
        return UNCHANGED  # the run has this model already
    reason = f"rolled back to version {target.record.version}: {order.reason}"
    if isinstance(run.state, Closing):
        return Obeyed(Spoiled(order.now, reason), rolled_back_to=target)
    return Obeyed(Stopped(order.now, reason), rolled_back_to=target)


def _target(to: int | Literal["best"], run: Situation) -> KeptVersion:
    number = _best(run) if to == "best" else to
    found = next((one for one in run.history if one.record.version == number), None)
    if found is None:
        newest = run.history[-1].record.version
        raise Refused("unknown-version", f"there is no version {number}; the run has versions 0 to {newest}")
    if found.record.deleted_at is not None:
        raise Refused(
            "version-deleted",
            f"version {number} was deleted, because the run file keeps only some versions ([retention] versions)",
        )
    return found


def _best(run: Situation) -> int:
    if run.file.stop is None:
        raise Refused(
            "unknown-version", "the run has no best version, because its run file has no [stop] that names a metric"
        )
    best = judge(run.file.stop, [one.record for one in run.history]).best
    if best is None:
        raise Refused(
            "unknown-version", f"the run has no best version yet, because {run.file.stop.metric} was not measured yet"
        )
    return best.version


def _refuse_if_over(run: Situation, what: str) -> None:
    if run.status.is_over:
        raise Refused("run-over", f"the run is over (status: {run.status.value}) and {what}")
