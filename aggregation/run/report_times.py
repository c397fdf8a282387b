"""How long clients take to report, estimated from ended rounds; and the binomial distribution for `tuning.py`.

A client at work either reports, or is lost (declines, falls silent). Some are observed only in part: a round that
closes stops looking, and nothing more is known of clients still at work (right censoring). The estimate of Aalen and
Johansen (1978) uses all three: with Y_j the weight of those still at work and watched just before the moment t_j, d_j
of the reports and l_j of the losses at it, and S the chance to be still at work,

    S(t) = prod_{t_j <= t} (1 - (d_j + l_j) / Y_j),    F(t) = sum_{t_j <= t} S(t_j-) d_j / Y_j.

It is right if being out of sight does not depend on when the client would have reported. A round closes when the
*others* have reported, so that holds except for the last one in.

At the horizon H fewer than ten clients or so are still watched, and the estimate ends. Beyond it a Pareto law is
assumed: the rate h at which those at work reported over the last half of the time, [H/2, H], falls as H/t, and so does
the rate g at which they were lost, so that of those at work at H

    (H/t)^{(h+g) H} are at work at t > H, and h/(h+g) of the others have reported.

A log-normal's rate, or any lighter tail's, falls more slowly in the end: this errs towards late and never.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord

Floats = NDArray[np.float64]
_TERMS_MAX = 20_000
_TINY, _ENOUGH = 1e-300, 1e-14
_lgamma = np.vectorize(math.lgamma, otypes=[np.float64])


def at_most(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> Floats:
    """P(B(n, p) <= k), by element, exact to rounding; the three are broadcast. `k` may be negative, or n and more.

    It is the regularised incomplete beta function I_{1-p}(n - k, k + 1) (Abramowitz and Stegun 26.5.24), computed by
    its continued fraction (26.5.8) with the modified Lentz algorithm (Thompson and Barnett 1986): some sqrt(n) terms.
    """
    ks, ns, ps = np.broadcast_arrays(np.asarray(k, float), np.asarray(n, float), np.asarray(p, float))
    result = np.where((ks >= ns) | (ps <= 0), 1.0, 0.0)
    result[ks < 0] = 0.0
    inner = (ks >= 0) & (ks < ns) & (ps > 0) & (ps < 1)
    if inner.any():
        result[inner] = _incomplete_beta(1 - ps[inner], ps[inner], ns[inner] - ks[inner], ks[inner] + 1)
    return result


def _incomplete_beta(x: Floats, y: Floats, a: Floats, b: Floats) -> Floats:
    """I_x(a, b) with y = 1 - x; of I_x(a, b) = 1 - I_y(b, a), the side whose fraction converges quickly is used."""
    swap = x > (a + 1) / (a + b + 2)
    x, y, a, b = (np.where(swap, second, first) for first, second in ((x, y), (y, x), (a, b), (b, a)))
    log_front = a * np.log(x) + b * np.log(y) + _lgamma(a + b) - _lgamma(a) - _lgamma(b)
    value = np.exp(log_front) / a * _fraction(x, a, b)
    return np.asarray(np.clip(np.where(swap, 1 - value, value), 0.0, 1.0), np.float64)


def _fraction(x: Floats, a: Floats, b: Floats) -> Floats:
    """1 / (1 + d_1 / (1 + d_2 / (1 + ...))) of 26.5.8."""
    c, d = np.ones_like(x), _away_from_zero(1 - (a + b) * x / (a + 1))
    d = 1 / d
    value = d.copy()
    for m in range(1, _TERMS_MAX):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / _away_from_zero(1 + even * d), _away_from_zero(1 + even / c)
        value *= c * d
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / _away_from_zero(1 + odd * d), _away_from_zero(1 + odd / c)
        value *= c * d
        if np.all(np.abs(c * d - 1) < _ENOUGH):
            break
    return value


def _away_from_zero(values: Floats) -> Floats:
    return np.where(np.abs(values) < _TINY, _TINY, values)


POINTS_MAX = 96
WATCHED_MIN = 10.0
_BEYOND = 24
_KOLMOGOROV_5 = 1.358
SECONDS_MIN = 0.001
Flags = NDArray[np.bool_]


class Seen(StrEnum):
    """What an ended attempt shows of one client."""

    REPORTED = "reported"
    NEVER = "never"  # it declined or fell silent
    AT_WORK = "at_work"  # when the round ended


@dataclass(frozen=True, slots=True)
class Observation:
    """One client in one attempt."""

    at: float  # when the attempt opened, in Unix seconds
    tier: str
    model_bytes: int
    seen: Seen
    seconds: float  # from the opening to its report, to its last sign of life, or to the end of the attempt


def observed(record: RoundRecord) -> tuple[Observation, ...]:
    """The observations from an ended attempt at training, committed or not.

    There are none from rounds that make no model, because other work takes other times; and none from attempts during
    which no coordinator could take reports, because how long clients would have taken is unknown.
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
    """Observations as columns, for arithmetic."""

    at: Floats
    tiers: NDArray[np.int64]  # indices into `tier_names`
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
    """The chance, at each time, to have reported by then, and to be still at work."""

    times_s: Floats  # ascending
    reported: Floats
    at_work: Floats
    n_known: Floats  # clients whose fate is known until then, as a number of equal weights (Kish's effective size)
    horizon_s: float  # from there on the tail is assumed

    def differs_from(self, other: "Curve", n_clients: float) -> bool:
        """Whether the two curves differ at the 5 % level (Kolmogorov and Smirnov).

        `n_clients`: the effective number of this curve's observations; `other` is taken as certain.
        """
        is_seen = self.times_s <= min(self.horizon_s, other.horizon_s)
        apart = np.abs(self.reported - np.interp(self.times_s, other.times_s, other.reported))[is_seen]
        return len(apart) > 0 and float(apart.max()) > _KOLMOGOROV_5 / np.sqrt(n_clients)


@dataclass(frozen=True, slots=True)
class _Watched:
    """Observations in the order of their times, with the estimate at each."""

    seconds: Floats
    reported: Floats
    at_work: Floats
    n_known: Floats
    horizon: int  # the index of H
    report_rate: float
    loss_rate: float


def estimate(table: TimesTable, weights: Floats, until_s: float) -> Curve:
    """The curve of the weighted observations at about a hundred times up to `until_s`, denser where more report."""
    watched = _watch(table, weights)
    horizon_s = float(watched.seconds[watched.horizon])
    times_s = _points(watched, until_s)
    at = (
        np.searchsorted(watched.seconds, np.minimum(times_s, horizon_s), side="right") - 1
    )  # -1: no observation by then
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
    """Observations of this kind per second at work, between half the horizon and the horizon."""
    end_s = float(seconds[horizon])
    at_work_s = float((weight * np.clip(seconds - end_s / 2, 0.0, end_s / 2)).sum())
    is_late = (seconds > end_s / 2) & (seconds <= end_s)
    return float(weight[kind & is_late].sum()) / max(at_work_s, 1e-300)


def _points(watched: _Watched, until_s: float) -> Floats:
    """Times with equal shares of reports between them, up to the horizon; some beyond; and `until_s`."""
    seen = watched.reported[: watched.horizon + 1]
    levels = np.linspace(0, seen[-1], POINTS_MAX + 1)[1:]
    inner = watched.seconds[np.searchsorted(seen, levels * (1 - 1e-12))]
    horizon_s = float(watched.seconds[watched.horizon])
    beyond = np.geomspace(horizon_s, until_s, _BEYOND) if horizon_s < until_s else inner[:0]
    return np.unique(np.concatenate([inner[inner < until_s], beyond[:-1], [until_s]]))


def _effective(weight: Floats, out_of_sight: Flags) -> Floats:
    """Kish's (sum w)^2 / sum w^2 over the clients still in sight at each of the ordered moments."""
    lost = np.where(out_of_sight, weight, 0.0)
    total = weight.sum() - np.cumsum(lost)
    squares = (weight**2).sum() - np.cumsum(lost**2)
    sizes = np.where(squares > 1e-12 * max((weight**2).sum(), 1e-300), total**2 / np.maximum(squares, 1e-300), 0.0)
    return np.asarray(sizes, np.float64)
