"""A window that tunes itself: deadline and over-selection for the next attempt, from measured report times. Pure.

Among all allowed windows W and cohorts of n clients with which at least the minimum m report with a probability of 0.99
or more, it chooses the greatest goodput: useful client seconds over all client seconds. The seconds of clients whose
reports count, in a round that commits, are useful. A client's seconds run from the opening to its report, to its last
sign of life, or to the moment it is told to stop.

Let each client of the cohort independently report by t with chance F(t) and be still at work with chance S(t), and let
the round close at its K-th report (the target) or at W. With B(n, p) binomial, these are exact:

    P(commit)   = P(B(n, F(W)) >= m)
    E[useful]   = n int_0^W t [P(B(n-1, F(t)) <= K-1) - P(B(n-1, F(W)) <= m-2)] dF(t)
    E[all]      = n int_0^W S(t) P(B(n-1, F(t)) <= K-1) dt
    E[duration] =   int_0^W P(B(n, F(t)) <= K-1) dt.

(A client's report at t counts if fewer than K others were in before, unless the round ends with fewer than m; then none
of its reports had K before it.) Of choices within 2 % of the greatest goodput it takes the shortest round: the last
percent of goodput can cost hours.

Assumptions: clients report independently of each other given the conditions, and the cohort is a fair sample of those
observed. For safety, F is replaced by its lower confidence bound (Wilson, one-sided 95 %) in P(commit); beyond the
longest watched time a heavy tail is assumed (`report_times.py`); with too few observations the run file's values stay;
an attempt after a failed one widens both; every eighth round has twice its window (up to the run file's), because a
short window hides slow clients.

Observations are weighted: by age (half as much every three days), by model size (a factor of two apart counts less), by
tier in the proportion in which tiers wait now, if known, and by hour of the day (a Gaussian of 1.5 h). All hours count
alike if too few observations are near, or if a Kolmogorov-Smirnov test finds no difference. Only distances between
hours of the coordinator's clock matter, so it need not be local time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.report_times import Curve, Floats, Observation, TimesTable, at_most, estimate, tabulate
from umbel.aggregation.types import WINDOW_MIN_S

CONFIDENCE = 0.99
OBSERVATIONS_MAX = 10_000
OVER_SELECTION_MAX = 3.0  # a round that needs more than three times its target has the wrong fleet
NEAR_BEST = 0.98
ENOUGH_CLIENTS = 40.0
ENOUGH_ROUNDS = 3
EXPLORE_EVERY = 8
_HALF_LIFE_S = 3 * 86_400.0
_HOUR_SD_H = 1.5
_SIZE_SD = float(np.log(2))
_SLACK = 1.02  # a window ends after the report that it is to wait for
_WILSON_Z = 1.645
_COHORTS = 48


@dataclass(frozen=True, slots=True)
class TuningFacts:
    """What is known when a plan is made."""

    observations: Sequence[Observation] = ()  # the newest `OBSERVATIONS_MAX` of the run, in any order
    model_bytes: int = 0  # of the model to be sent; 0 if unknown
    population: int | None = None  # distinct clients that could be asked; None if unknown
    waiting: Mapping[str, int] = field(default_factory=dict[str, int])  # clients that wait, by tier; empty if unknown


NOTHING_KNOWN = TuningFacts()


@dataclass(frozen=True, slots=True)
class Tuned:
    """The choice for the next attempt."""

    window_s: float
    over_selection: float
    why: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expectation for each allowed cohort (rows) and window (columns): chances, and client seconds of one round."""

    n_asked: Floats
    window_s: Floats
    p_commit: Floats
    useful_s: Floats
    total_s: Floats
    duration_s: Floats

    @property
    def goodput(self) -> Floats:
        return self.useful_s / np.maximum(self.total_s, 1e-300)


def next_plan(file: RunFile, number: int, attempt: int, evidence: TuningFacts, now: float) -> RoundPlan:
    """The plan of an attempt: the run file's, changed by self-tuning if the run file asks for it."""
    plan, rounds = file.round_plan(number, attempt), file.rounds_of(number)
    if not rounds.self_tuning:
        return plan
    tuned = tune(plan, rounds.window_min_s, evidence, now)
    return replace(plan, window_s=tuned.window_s, over_selection=tuned.over_selection, tuned=tuned.why)


def tune(plan: RoundPlan, window_min_s: float, evidence: TuningFacts, now: float) -> Tuned:
    """Window and over-selection for `plan`, whose own window is the longest allowed. `now`: Unix seconds."""
    observations = sorted(evidence.observations, key=lambda one: one.at)[-OBSERVATIONS_MAX:]
    curve, basis = _curve(tabulate(observations), evidence, now, plan.window_s)
    if curve is None:
        return _widened(plan, Tuned(plan.window_s, plan.over_selection, f"as the run file says: {basis}"))
    forecast = foresee(plan, window_min_s, curve, evidence.population)
    row, column, is_sure = _best(forecast)
    n_asked, window_s = float(forecast.n_asked[row]), float(forecast.window_s[column])
    why = (
        f"from {basis}: {forecast.p_commit[row, column]:.1%} of such rounds get {counted(plan.minimum, 'report')}, "
        f"{forecast.goodput[row, column]:.0%} of client time is of use; the run file says {plan.window_s:g} s "
        f"and {plan.over_selection:g}"
    )
    if not is_sure:
        why = (
            f"no allowed choice is sure enough to get {counted(plan.minimum, 'report')}, so the surest is taken, {why}"
        )
    return _widened(plan, Tuned(window_s, n_asked / plan.target, why))


def foresee(plan: RoundPlan, window_min_s: float, curve: Curve, population: int | None) -> Forecast:
    """Evaluate the formulas above for every allowed choice."""
    n = _cohorts(plan, population)[:, None]
    times, by_then = curve.times_s, curve.reported
    # A report at t depends on the others just before it.
    wants_more = _before(at_most(plan.target - 1, n - 1, by_then))
    arrivals, steps = np.diff(by_then, prepend=0.0) * times, np.diff(times, prepend=0.0)
    p_short = at_most(plan.minimum - 2, n - 1, by_then)
    useful = n * (np.cumsum(arrivals * wants_more, axis=1) - p_short * np.cumsum(arrivals))
    total = n * np.cumsum(steps * _before(curve.at_work[None]) * wants_more, axis=1)
    return Forecast(
        n_asked=n[:, 0],
        window_s=np.clip(times * _SLACK, max(window_min_s, WINDOW_MIN_S), plan.window_s),
        p_commit=1 - at_most(plan.minimum - 1, n, _lower_bound(curve)),
        useful_s=np.maximum(useful, 0.0),
        total_s=total,
        duration_s=np.cumsum(steps * _before(at_most(plan.target - 1, n, by_then)), axis=1),
    )


def _before(chances: Floats) -> Floats:
    """Each row one step earlier; at the start all clients are at work and the round is open."""
    return np.concatenate([np.ones_like(chances[:, :1]), chances[:, :-1]], axis=1)


def _best(forecast: Forecast) -> tuple[int, int, bool]:
    """The row and column of the choice, and whether it reaches the wanted confidence."""
    is_sure = forecast.p_commit >= CONFIDENCE
    if not is_sure.any():
        surest = forecast.p_commit >= forecast.p_commit.max() - 1e-12
        rows, columns = np.nonzero(surest)
        return int(rows[-1]), int(columns[-1]), False  # the widest of them
    goodput = np.where(is_sure, forecast.goodput, -1.0)
    is_near = goodput >= NEAR_BEST * goodput.max()
    duration_s = np.where(is_near, forecast.duration_s, np.inf)
    row, column = np.unravel_index(int(np.argmin(duration_s)), duration_s.shape)
    return int(row), int(column), True


def _widened(plan: RoundPlan, tuned: Tuned) -> Tuned:
    """Widen both after a failed attempt, and the window in every eighth round."""
    window_s, over_selection, why = tuned.window_s, tuned.over_selection, tuned.why
    if plan.attempt > 1:
        times = 2.0 ** min(plan.attempt - 1, 30)
        most = max(OVER_SELECTION_MAX, plan.over_selection)
        over_selection = min(over_selection * 1.25 ** min(plan.attempt - 1, 30), most)
        window_s, why = window_s * times, f"widened after {counted(plan.attempt - 1, 'abandoned attempt')}, {why}"
    elif plan.number % EXPLORE_EVERY == 0:
        window_s, why = 2 * window_s, f"twice the window, to see who would still have come, {why}"
    return Tuned(min(_three_digits(window_s), plan.window_s), over_selection, why)


def _three_digits(window_s: float) -> float:
    """Round up to three digits, for people."""
    unit = 10.0 ** (math.floor(math.log10(window_s)) - 2)
    return round(math.ceil(window_s / unit - 1e-9) * unit, 9)


def _cohorts(plan: RoundPlan, population: int | None) -> Floats:
    """The sizes of cohorts to choose from: the target to three times that, at most the population."""
    most = plan.target * OVER_SELECTION_MAX
    if population is not None:
        most = min(most, max(population, plan.target))
    return np.unique(np.ceil(np.geomspace(plan.target, most, _COHORTS) - 1e-9))


def _lower_bound(curve: Curve) -> Floats:
    """Wilson's lower bound of the chance to have reported."""
    n, p, z = np.maximum(curve.n_known, 1e-9), curve.reported, _WILSON_Z
    centre, spread = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return np.clip((centre - spread) / (1 + z * z / n), 0.0, 1.0)


def _curve(table: TimesTable, evidence: TuningFacts, now: float, until_s: float) -> tuple[Curve | None, str]:
    """How long reports take in this hour, or in all if they do not differ; and the basis in words.

    None if there are too few observations.
    """
    if not table.is_report.any():
        return None, "no report times are known yet"
    aged = 0.5 ** (np.maximum(now - table.at, 0.0) / _HALF_LIFE_S) * _like_size(table, evidence.model_bytes)
    aged = aged * _like_tiers(table, evidence.waiting)
    if not _is_enough(table, aged):
        whose = counted(round(_size(aged)), "client's time", "clients' times")
        rounds = counted(round(_rounds(table, aged)), "round")
        return None, f"only {whose} in {rounds} {agreeing(round(_size(aged)), 'is', 'are')} known"
    at_all_hours, near = estimate(table, aged, until_s), aged * _like_hour(table, now)
    if _is_enough(table, near):
        at_this_hour = estimate(table, near, until_s)
        if at_this_hour.differs_from(at_all_hours, _size(near)):
            return at_this_hour, f"{counted(round(_size(near)), 'client')} at this hour of the day"
    return at_all_hours, f"{counted(round(_size(aged)), 'client')} at all hours"


def _like_hour(table: TimesTable, now: float) -> Floats:
    apart_h = np.abs((now - table.at) / 3600.0 % 24.0)
    apart_h = np.minimum(apart_h, 24.0 - apart_h)
    return np.asarray(np.exp(-0.5 * (apart_h / _HOUR_SD_H) ** 2), np.float64)


def _is_enough(table: TimesTable, weights: Floats) -> bool:
    return _size(weights) >= ENOUGH_CLIENTS and _rounds(table, weights) >= ENOUGH_ROUNDS


def _like_size(table: TimesTable, model_bytes: int) -> Floats:
    """Weights by the doublings between the model sizes; all equal if the next size is unknown."""
    if not model_bytes:
        return np.ones(len(table.model_bytes))
    apart = np.log(np.maximum(table.model_bytes, 1.0) / model_bytes) / _SIZE_SD
    return np.asarray(np.exp(-0.5 * apart**2), np.float64)


def _like_tiers(table: TimesTable, waiting: Mapping[str, int]) -> Floats:
    """Weights that give tiers the proportion in which they wait now; tiers never observed count as the average."""
    names, n_tiers = table.tier_names, len(table.tier_names)
    wanted = np.array([waiting.get(name, 0) for name in names], np.float64)
    if n_tiers < 2 or not wanted.any():
        return np.ones(len(table.tiers))
    seen = np.bincount(table.tiers, minlength=n_tiers).astype(np.float64)
    return np.asarray((wanted / wanted.sum() / (seen / seen.sum()))[table.tiers], np.float64)


def _rounds(table: TimesTable, weights: Floats) -> float:
    """The effective number of rounds that the observations come from."""
    _, rounds = np.unique(table.at, return_inverse=True)
    return _size(np.asarray(np.bincount(rounds, weights=weights), np.float64))


def _size(weights: Floats) -> float:
    """Kish's effective size: the number of observations of equal weight that would have the same information."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0
