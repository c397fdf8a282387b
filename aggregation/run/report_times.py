"""How long clients take to report: what rounds have shown of it, and the curve that follows from that.

Two things can happen to a client at work: it reports, or it is lost (declines, falls silent). Some are seen only in
part: a round that closes stops looking, and of whoever was still at work then nothing more is known (right censoring).
The estimate of Aalen and Johansen (1978) makes the best of all three: with Y_j the weight of those still at work and
watched just before the moment t_j, d_j of the reports and l_j of the losses at it, and S the chance to be still at
work,

    S(t) = prod_{t_j <= t} (1 - (d_j + l_j) / Y_j),    F(t) = sum_{t_j <= t} S(t_j-) d_j / Y_j.

It is right if whether a client goes out of sight says nothing of when it would have reported; a round closes when the
*others* have reported, so that holds but for the last one in.

Where fewer than some ten clients were still watched, at the horizon H, the estimate ends. What is beyond is taken to
follow a Pareto law: the rate h at which those at work reported over the last half of the time, [H/2, H], is taken to
fall as H/t, and so is the rate g at which they were lost, so that of those at work at H

    (H/t)^{(h+g) H} are at work at t > H, and h/(h+g) of the others have reported.

A log-normal's rate, or any lighter tail's, falls more slowly in the end: this errs towards late and never.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from umbel.aggregation.run.binomial import Floats
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord

POINTS_MAX = 96
WATCHED_MIN = 10.0
_BEYOND = 24
_KOLMOGOROV_5 = 1.358
SECONDS_MIN = 0.001
Flags = NDArray[np.bool_]


class Seen(StrEnum):
    """`reported`: at that time; `never`: it declined or fell silent; `at_work`: it was, when the round ended."""

    REPORTED = "reported"
    NEVER = "never"
    AT_WORK = "at_work"


@dataclass(frozen=True, slots=True)
class Observation:
    """One client in one attempt that opened at `at` (Unix seconds) with a model of `model_bytes`.

    `seconds`: from the opening to its report, to its last sign of life, or to the end of the attempt.
    """

    at: float
    tier: str
    model_bytes: int
    seen: Seen
    seconds: float


def observed(record: RoundRecord) -> tuple[Observation, ...]:
    """What an ended attempt at training shows: a report is one, whether or not its round came to anything.

    Rounds that make no model ask for other work, which takes other times: they show nothing. Neither do those in which
    no coordinator was there for a while: how long clients would have taken is not known.
    """
    if not record.task.makes_model or record.away_s:
        return ()
    return tuple(_observe(record, client) for client in record.clients)


def _observe(record: RoundRecord, client: ClientRecord) -> Observation:
    match client.fate:
        case _ if client.report_s is not None:
            seen, seconds = Seen.REPORTED, client.report_s
        case Fate.DECLINED:
            seen, seconds = Seen.NEVER, 0.0  # it says so when it sees the assignment, before it works
        case Fate.LOST:
            seen, seconds = Seen.NEVER, max(0.0, record.open_s - client.silent_s)
        case _:
            seen, seconds = Seen.AT_WORK, record.open_s
    return Observation(record.opened_at, client.tier, record.model_bytes, seen, seconds)


@dataclass(frozen=True, slots=True)
class TimesTable:
    """Observations as columns, for arithmetic. `tiers`: as indices into `tier_names`."""

    at: Floats
    tiers: NDArray[np.int64]
    tier_names: tuple[str, ...]
    model_bytes: Floats
    is_report: Flags
    is_never: Flags
    seconds: Floats


def tabulate(observations: Sequence[Observation]) -> TimesTable:
    names = tuple(sorted({one.tier for one in observations}))
    index = {name: i for i, name in enumerate(names)}
    return TimesTable(
        at=np.array([one.at for one in observations], np.float64),
        tiers=np.array([index[one.tier] for one in observations], np.int64),
        tier_names=names,
        model_bytes=np.array([one.model_bytes for one in observations], np.float64),
        is_report=np.array([one.seen is Seen.REPORTED for one in observations], np.bool_),
        is_never=np.array([one.seen is Seen.NEVER for one in observations], np.bool_),
        seconds=np.array([max(one.seconds, SECONDS_MIN) for one in observations], np.float64),
    )


@dataclass(frozen=True, slots=True)
class Curve:
    """At each of `times_s`, ascending: the chance to have reported by then, and to be still at work.

    `n_known`: as how many clients of equal weight those count whose fate is known until then (Kish's effective size).
    `horizon_s`: from there on the tail is a guess.
    """

    times_s: Floats
    reported: Floats
    at_work: Floats
    n_known: Floats
    horizon_s: float

    def differs_from(self, other: "Curve", n_clients: float) -> bool:
        """Whether these are other clients' times than `other`'s, at the 5 % level (Kolmogorov and Smirnov).

        `n_clients`: as how many this curve's observations count; `other` is taken for certain.
        """
        is_seen = self.times_s <= min(self.horizon_s, other.horizon_s)
        apart = np.abs(self.reported - np.interp(self.times_s, other.times_s, other.reported))[is_seen]
        return len(apart) > 0 and float(apart.max()) > _KOLMOGOROV_5 / np.sqrt(n_clients)


@dataclass(frozen=True, slots=True)
class _Watched:
    """Observations in the order of their times, with what the estimate needs at each; `horizon`: index of H."""

    seconds: Floats
    reported: Floats
    at_work: Floats
    n_known: Floats
    horizon: int
    report_rate: float
    loss_rate: float


def estimate(table: TimesTable, weights: Floats, until_s: float) -> Curve:
    """The curve of the weighted observations, at about a hundred times up to `until_s`, denser where more report."""
    watched = _watch(table, weights)
    horizon_s = float(watched.seconds[watched.horizon])
    times_s = _points(watched, until_s)
    at = np.searchsorted(watched.seconds, np.minimum(times_s, horizon_s), side="right") - 1  # -1: nobody by then
    reported = np.where(at >= 0, watched.reported[at], 0.0)
    at_work = np.where(at >= 0, watched.at_work[at], 1.0)
    rate = watched.report_rate + watched.loss_rate
    left = (horizon_s / np.maximum(times_s, horizon_s)) ** (rate * horizon_s)
    share = watched.report_rate / rate if rate else 0.0
    return Curve(times_s, reported + at_work * (1 - left) * share, at_work * left, watched.n_known[at], horizon_s)


def _watch(table: TimesTable, weights: Floats) -> _Watched:
    order = np.argsort(table.seconds, kind="stable")
    seconds, weight = table.seconds[order], weights[order]
    is_report, is_never = table.is_report[order], table.is_never[order]
    at_risk = np.maximum(weight.sum() - np.cumsum(weight) + weight, 1e-300)
    leaves = np.where(is_report | is_never, weight, 0.0) / at_risk
    at_work = np.cumprod(1 - np.minimum(leaves, 1.0))
    reported = np.cumsum(np.concatenate([[1.0], at_work[:-1]]) * np.where(is_report, weight, 0.0) / at_risk)
    n_after = _effective(weight, np.ones(len(weight), np.bool_))
    horizon = max(int(np.count_nonzero(n_after >= WATCHED_MIN)) - 1, 0)
    report_rate, loss_rate = (_rate(seconds, weight, kind, horizon) for kind in (is_report, is_never))
    return _Watched(
        seconds=seconds,
        reported=reported,
        at_work=at_work,
        n_known=_effective(weight, ~(is_report | is_never)),
        horizon=horizon,
        report_rate=report_rate,
        loss_rate=loss_rate,
    )


def _rate(seconds: Floats, weight: Floats, kind: Flags, horizon: int) -> float:
    """How many of this kind there were per second at work, between half the horizon and the horizon."""
    end_s = float(seconds[horizon])
    at_work_s = float((weight * np.clip(seconds - end_s / 2, 0.0, end_s / 2)).sum())
    is_late = (seconds > end_s / 2) & (seconds <= end_s)
    return float(weight[kind & is_late].sum()) / max(at_work_s, 1e-300)


def _points(watched: _Watched, until_s: float) -> Floats:
    """Times between which alike many report, up to the horizon; some beyond; and `until_s`."""
    seen = watched.reported[: watched.horizon + 1]
    levels = np.linspace(0, seen[-1], POINTS_MAX + 1)[1:]
    inner = watched.seconds[np.searchsorted(seen, levels * (1 - 1e-12))]
    horizon_s = float(watched.seconds[watched.horizon])
    beyond = np.geomspace(horizon_s, until_s, _BEYOND) if horizon_s < until_s else inner[:0]
    return np.unique(np.concatenate([inner[inner < until_s], beyond[:-1], [until_s]]))


def _effective(weight: Floats, out_of_sight: Flags) -> Floats:
    """Kish's (sum w)^2 / sum w^2 over everybody who was not out of sight by each of the ordered moments."""
    lost = np.where(out_of_sight, weight, 0.0)
    total = weight.sum() - np.cumsum(lost)
    squares = (weight**2).sum() - np.cumsum(lost**2)
    sizes = np.where(squares > 1e-12 * max((weight**2).sum(), 1e-300), total**2 / np.maximum(squares, 1e-300), 0.0)
    return np.asarray(sizes, np.float64)
