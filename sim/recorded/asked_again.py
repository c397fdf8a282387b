"""Measures the simulation error: a fleet made of a trace is asked again what the recorded clients were asked.

Each recorded attempt is played again at its time of day, in virtual time, through the coordinator's own state machine,
with its window, target, minimum and over-selection, and with models and updates of its sizes. Nobody trains. The fleet
says which devices wait and what becomes of each. Coverage and weights of draws are not in a trace, so they are left
out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import Gathered, Recruiting, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.ledger import Ending, client_records, round_record
from umbel.aggregation.run.records import Fate, RoundRecord
from umbel.aggregation.run.report_times import Floats
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.run.trace import Trace, TracedAttempt, TracedClient, trace_of
from umbel.aggregation.types import RunId, client_name, client_number
from umbel.sim.data.partition.partition import Indices
from umbel.sim.experiment.trials import Estimate
from umbel.sim.federation.local_work import Reports
from umbel.sim.federation.window import Cohort, Window
from umbel.sim.fleet.fates import CohortAsk
from umbel.sim.fleet.fleet import Fleet
from umbel.sim.fleet.presence import DAY_S

ATTEMPTS_MAX, ASKED_MAX = 300, 50_000  # attempts, and clients in all: enough, and done in seconds
_SAMPLES = 1  # of each client, so that draws are even
_LOOK_AGAIN_S, _LOOKS_MAX = 600.0, 144  # for a day, if fewer than the minimum are present


class NobodyComes(ValueError):
    """Too few devices of a fleet are ever present for its rounds."""


def askable(trace: Trace) -> Trace | None:
    """The attempts that can be asked again, because the trace says when they were to close: `ATTEMPTS_MAX` at most,
    fewer of large cohorts, evenly taken. None for a trace of an older coordinator.
    """
    known = [attempt for attempt in trace.attempts if attempt.reports_wanted is not None]
    if not known:
        return None
    n_asked = sum(len(attempt.clients) for attempt in known)
    every = max(-(-len(known) // ATTEMPTS_MAX), -(-n_asked // ASKED_MAX))
    return replace(trace, attempts=tuple(known[::every]))


def with_rounds(trace: Trace, rounds: RoundsSection) -> Trace:
    """The same attempts and work, with the window, the over-selection and the targets of these rounds."""
    attempts = (
        replace(
            attempt,
            window_s=rounds.window_s,
            over_selection=rounds.asked_share,
            reports_wanted=rounds.target,
            reports_needed=rounds.minimum,
        )
        for attempt in trace.attempts
    )
    return replace(trace, attempts=tuple(attempts))


def asked_again(trace: Trace, fleet: Fleet, seed: int) -> Trace:
    """How these attempts go with this fleet. `trace`: from `askable`; `seed`: for the draw of cohorts.

    Raises `NobodyComes` if no round begins, `ValueError` for an invalid plan.
    """
    steps, midnight = _steps(trace), trace.attempts[0].opened_at // DAY_S * DAY_S
    usual_bytes = _mean_bytes([one for attempt in trace.attempts for one in attempt.in_time], "bytes_up", 1)
    records = list[RoundRecord]()
    for number, attempt in enumerate(trace.attempts, 1):
        question = _Question(
            plan=_plan(attempt, number, seed),
            at=max(0.0, attempt.opened_at - midnight),
            bytes_up=_mean_bytes(attempt.in_time, "bytes_up", usual_bytes),
            bytes_down=_mean_bytes(attempt.in_time, "bytes_down", attempt.model_bytes),
            model_bytes=attempt.model_bytes,
        )
        records += _attempt(question, fleet, steps)
    if not records:
        raise NobodyComes("this trace's fleet never has enough devices present for its rounds to begin")
    return trace_of(records)


@dataclass(frozen=True, slots=True)
class _Question:
    """What one attempt asks. `at`: when it opens, in seconds from a midnight; bytes are of one client."""

    plan: RoundPlan
    at: float
    bytes_up: int
    bytes_down: int
    model_bytes: int


def _plan(attempt: TracedAttempt, number: int, seed: int) -> RoundPlan:
    """`number`: unique, even in a trace of several runs."""
    assert attempt.reports_wanted is not None, "others are not asked again"
    assert attempt.reports_needed is not None, "both are known, or neither is"
    return RoundPlan(
        run=RunId("recorded"),
        number=number,
        attempt=1,
        target=attempt.reports_wanted,
        minimum=attempt.reports_needed,
        over_selection=attempt.over_selection,
        window_s=attempt.window_s,
        weighting=Weighting.SAMPLES,
        sample_count_max=1,
        max_abs=1.0,
        seed=seed,
    )


def _attempt(question: _Question, fleet: Fleet, steps: Indices) -> Iterator[RoundRecord]:
    """Its record; none if too few devices are present all day."""
    opened = _opened(question, fleet, len(steps))
    if opened is None:
        return
    names = sorted(opened.cohort)
    numbers = np.array([client_number(name) for name in names], dtype=np.int64)
    asked = steps[numbers]
    up, down = np.array([question.bytes_up]), np.array([question.bytes_down])
    ask = CohortAsk(asked, 1, down, up, question.plan.window_s)
    fates = fleet.fates(numbers, question.plan.number, 1, opened.opened_at, ask)
    cohort = Cohort(names, fates, Reports.before(np.full(len(names), _SAMPLES), asked, fates).works)
    played = Window(opened, cohort).play({})
    ended, clients = played.ended, client_records(played.ended, played.book({}, {}))
    ending = Ending(question.plan.number, None, ended.reason, ended.closed_at, question.model_bytes)
    yield round_record(ended, clients, ended.opened_at, ending)


def _opened(question: _Question, fleet: Fleet, n_devices: int) -> Training | None:
    """Open with the devices present at that time, as the recorded round did; later if they are too few."""
    plan = question.plan
    for looks in range(_LOOKS_MAX):
        now = question.at + looks * _LOOK_AGAIN_S
        waiting = fleet.waiting(now, plan.number, 1, n_devices, plan.n_wanted)
        candidates = tuple(Candidate(client_name(number), _SAMPLES) for number in waiting.tolist())
        state, _ = advance(Recruiting(plan, now - plan.patience_s), Gathered(now, candidates))
        if isinstance(state, Training):
            return state
    return None


def _steps(trace: Trace) -> Indices:
    """The usual number of steps of each client; the median for those that have not reported; 1 if unknown."""
    rows = [(one.client, one.steps_planned) for attempt in trace.attempts for one in attempt.clients]
    clients, planned = np.array(rows, dtype=np.int64).T
    is_known = planned > 0
    if not is_known.any():
        return np.ones(trace.clients, dtype=np.int64)
    counts: Floats = np.bincount(clients[is_known], minlength=trace.clients).astype(np.float64)
    sums = np.bincount(clients[is_known], weights=planned[is_known], minlength=trace.clients)
    usual = float(np.median(planned[is_known]))
    means = np.where(counts > 0, sums / np.maximum(counts, 1.0), usual)
    return np.maximum(1, np.rint(means)).astype(np.int64)


def _mean_bytes(clients: Sequence[TracedClient], name: str, default: int) -> int:
    """The mean over clients that have reported, or else `default`: others may have been stopped in the middle."""
    return round(sum(getattr(one, name) for one in clients) / len(clients)) if clients else default


_GONE = (Fate.LOST, Fate.DECLINED)


@dataclass(frozen=True, slots=True)
class FigureError:
    """A figure of the attempts that were asked again: the recorded one, and the simulated ones over fleets."""

    what: str
    unit: str
    recorded: float
    simulated: Estimate

    @property
    def relative(self) -> float | None:
        """How much the simulated figure exceeds the recorded one, as a share of it; None if almost nothing was."""
        relative = (self.simulated.mean - self.recorded) / self.recorded if self.recorded else math.inf
        return relative if math.isfinite(relative) else None


def compare(recorded: Trace, simulated: Sequence[Trace]) -> tuple[FigureError, ...]:
    """The figures of attempts, recorded and simulated; none without a simulated trace."""
    return tuple(
        FigureError(what, unit, measure(recorded.attempts), found)
        for what, unit, measure in _FIGURES
        if (found := Estimate.of([measure(one.attempts) for one in simulated])) is not None
    )


def _mean(of: Callable[[TracedAttempt], float]) -> Callable[[Sequence[TracedAttempt]], float]:
    return lambda attempts: float(np.mean([of(attempt) for attempt in attempts]))


def _open_s(share: float) -> Callable[[Sequence[TracedAttempt]], float]:
    return lambda attempts: float(np.quantile([attempt.open_s for attempt in attempts], share))


def _report_s(share: float) -> Callable[[Sequence[TracedAttempt]], float]:
    def quantile(attempts: Sequence[TracedAttempt]) -> float:
        seconds = [c.report_s for attempt in attempts for c in attempt.clients if c.report_s is not None]
        return float(np.quantile(seconds, share)) if seconds else 0.0

    return quantile


_FIGURES: tuple[tuple[str, str, Callable[[Sequence[TracedAttempt]], float]], ...] = (
    ("open, mean", "s", _mean(lambda attempt: attempt.open_s)),
    ("open, median", "s", _open_s(0.5)),
    ("open, nine in ten within", "s", _open_s(0.9)),
    ("committed", "share", _mean(lambda attempt: float(attempt.committed))),
    ("clients asked", "clients", _mean(lambda attempt: len(attempt.clients))),
    ("reports in", "clients", _mean(lambda attempt: len(attempt.in_time))),
    ("partial reports", "clients", _mean(lambda attempt: sum(c.fate is Fate.PARTIAL for c in attempt.clients))),
    ("drop-outs: asked and not in", "clients", _mean(lambda attempt: len(attempt.clients) - len(attempt.in_time))),
    ("lost or declined", "clients", _mean(lambda attempt: sum(c.fate in _GONE for c in attempt.clients))),
    ("report after, median client", "s", _report_s(0.5)),
    ("report after, nine in ten clients", "s", _report_s(0.9)),
    ("bytes up", "bytes", _mean(lambda attempt: attempt.bytes_up)),
    ("bytes down", "bytes", _mean(lambda attempt: attempt.bytes_down)),
)
