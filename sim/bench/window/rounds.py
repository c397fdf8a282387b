"""Rounds of these fleets in virtual time, through the same machine that the coordinator drives: `advance`.

Nothing waits: time is a number, and taking the next report off the list is what moves it.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.machine import advance, next_deadline
from umbel.aggregation.round.retry import next_attempt
from umbel.aggregation.round.states import (
    Abandoned,
    Applied,
    Closing,
    Gathered,
    Recruiting,
    Reported,
    RoundState,
    Tick,
    Training,
)
from umbel.aggregation.run.report_times import Observation, Seen
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX, TuningFacts
from umbel.sim.bench.window.fleets import SAMPLES, Fates, Fleet, device_index

EVERY_S = 1800.0  # a round begins every half hour, so that a few hundred of them see days and nights
_WORK = WorkDone(SAMPLES, 1, 1, "0" * 64)
_MODEL_BYTES = 1_000_000

Planner = Callable[[int, int, TuningFacts, float], RoundPlan]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an attempt cost and brought. Client seconds: of those whose report counts, and of all that were asked."""

    number: int
    committed: bool
    window_s: float
    over_selection: float
    n_reported: int
    open_s: float
    useful_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Course:
    """The attempts of one run, and the seconds that its rounds took from their beginning to their commit, in all."""

    attempts: tuple[Attempt, ...]
    rounds_s: float

    @property
    def goodput(self) -> float:
        return sum(attempt.useful_s for attempt in self.attempts) / sum(attempt.total_s for attempt in self.attempts)

    @property
    def n_committed(self) -> int:
        return sum(attempt.committed for attempt in self.attempts)


def play(fleet: Fleet, planner: Planner, n_rounds: int, seed: int) -> Course:
    """Run `n_rounds` rounds to their commit. `planner`: makes the plan of an attempt from what was seen so far."""
    seen: deque[Observation] = deque(maxlen=OBSERVATIONS_MAX)
    attempts: list[Attempt] = []
    now, rounds_s = 0.0, 0.0
    for number in range(1, n_rounds + 1):
        began = now = max(now, number * EVERY_S)
        state = Recruiting(planner(number, 1, _evidence(fleet, seen), now), since=now)
        while True:
            fates = fleet.round_of(seed, number, state.plan.attempt, state.since)
            training = _recruit(state, fates)
            ended = _train(training, fates)
            attempts.append(_account(ended, fates))
            seen.extend(_observations(ended, fates))
            now = ended.closed_at
            if isinstance(ended, Closing):
                break
            plan = planner(number, ended.plan.attempt + 1, _evidence(fleet, seen), now)
            state = next_attempt(ended, plan, now)
        rounds_s += now - began
    return Course(tuple(attempts), rounds_s)


def _evidence(fleet: Fleet, seen: deque[Observation]) -> TuningFacts:
    return TuningFacts(tuple(seen), _MODEL_BYTES, fleet.n_devices)


def _recruit(state: Recruiting, fates: Fates) -> Training:
    """Wait for as long as the machine wants to: the same devices are there all the while."""
    candidates, now = fates.candidates(), state.since
    following: RoundState = state
    while isinstance(following, Recruiting):
        following, _ = advance(following, Gathered(now, candidates))
        now = next_deadline(following, now) or now
        if isinstance(following, Recruiting) and now > state.since + 2 * state.plan.patience_s:
            raise ValueError(f"the fleet is too small for its rounds: {following.why}")
    assert isinstance(following, Training)
    return following


def _train(training: Training, fates: Fates) -> Closing | Abandoned:
    """Every report that would come before the window's end, in order, until the round ends."""
    state: RoundState = training
    reports = sorted(
        (training.opened_at + float(fates.work_s[i]), client)
        for client in training.cohort
        if math.isinf(fates.lost_s[i := device_index(client)])
    )
    for at, client in reports:
        state, _ = advance(state, Reported(at, client, _WORK) if at < training.closes_at else Tick(training.closes_at))
        if not isinstance(state, Training):
            break
    if isinstance(state, Training):
        state, _ = advance(state, Tick(training.closes_at))
    assert isinstance(state, Closing | Abandoned)
    if isinstance(state, Closing):
        advance(state, Applied(state.closed_at, "0" * 64))
    return state


def _account(ended: Closing | Abandoned, fates: Fates) -> Attempt:
    open_s, is_committed = ended.closed_at - ended.opened_at, isinstance(ended, Closing)
    useful_s = total_s = 0.0
    for client in ended.cohort:
        i = device_index(client)
        seconds = min(float(fates.work_s[i]), float(fates.lost_s[i]), open_s)
        total_s += seconds
        useful_s += seconds if is_committed and client in ended.accepted else 0.0
    plan = ended.plan
    return Attempt(
        plan.number,
        is_committed,
        plan.window_s,
        plan.over_selection,
        len(ended.accepted),
        open_s,
        useful_s,
        total_s,
    )


def _observations(ended: Closing | Abandoned, fates: Fates) -> list[Observation]:
    """What the coordinator's record of this attempt would show: who has been silent for long counts as lost."""
    open_s, silence_s = ended.closed_at - ended.opened_at, max(2.0, ended.plan.window_s / 10)
    shown = Observation(ended.opened_at, "", _MODEL_BYTES, Seen.AT_WORK, open_s)
    rows: list[Observation] = []
    for client in ended.cohort:
        i = device_index(client)
        lost_s = float(fates.lost_s[i])
        if client in ended.accepted:
            rows.append(replace(shown, seen=Seen.REPORTED, seconds=float(fates.work_s[i])))
        elif open_s - lost_s > silence_s:
            rows.append(replace(shown, seen=Seen.NEVER, seconds=lost_s))
        else:
            rows.append(shown)
    return rows
