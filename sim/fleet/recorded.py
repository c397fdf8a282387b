"""A fleet like that of a production run, from its trace.

Device d is like the d-th client of the trace; beyond the last, the clients repeat, each with its own random draws. A
client's figures come from its own measurements; the fewer it has, the more they come from those of all clients
(`fit`):

- *speed*: seconds a step, which is training time over steps done. A client that still trained when its round closed
  took longer than that.
- *lines*: what clients measured of their uploads. The rest of the time to a report, neither training nor upload, counts
  as the download, and includes round trips, waiting for a reply and encoding.
- *losses*: clients that were silent from the start, as a chance; clients lost at work, as a rate. A client that fell
  silent shortly before its round closed may not be lost, so time counts until shortly before.
- *presence*: by the hour of the coordinator's clock, the share of known clients that waited; for each client, how much
  more or less often than others it was present, as far as the trace names absent clients. If the trace names none,
  devices are always present.

Where training times are unknown (secure rounds), the seconds from opening to report stand for the whole work, lines
included. Such a fleet can answer what-ifs about windows and targets, but not about another codec.
"""

from dataclasses import dataclass

import numpy as np
import torch

from umbel.aggregation.round.pace import MARGIN
from umbel.aggregation.run.records import Fate
from umbel.aggregation.run.report_times import Floats
from umbel.aggregation.run.trace import Trace, TracedAttempt, TracedClient
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import Trait
from umbel.sim.fleet.fates import Dropouts
from umbel.sim.fleet.faults import Faults
from umbel.sim.fleet.fleet import Fleet, Network, Speed
from umbel.sim.fleet.presence import HOUR_S, Always, Flags, Hours, Presence, Zones

_TURNS, _SETTLING = 200, 100
_VARIANCE_MIN = 1e-6
_FAR = 30.0  # standard deviations beyond which nothing is drawn


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is known of each client's mean: `mean`, `deviation`, both (n,); `within`: s, the same for all."""

    mean: Floats
    deviation: Floats
    within: float


def fit(clients: Indices, logs: Floats, is_cut: Flags, n_clients: int) -> Fitted | None:
    """`logs`: of each measurement, or a lower bound of it where `is_cut`. None if all are cut. Draws are repeatable."""
    if not len(logs) or is_cut.all():
        return None
    rng, counts, whole = np.random.default_rng(0), np.bincount(clients, minlength=n_clients), logs.copy()
    seen = counts > 0
    m = float(logs[~is_cut].mean())
    s2 = t2 = max(float(logs[~is_cut].var()) / 2, _VARIANCE_MIN)
    drawn = np.full(n_clients, m)
    sums, squares, within = np.zeros(n_clients), np.zeros(n_clients), 0.0
    for turn in range(_TURNS):
        whole[is_cut] = _beyond(logs[is_cut], drawn[clients[is_cut]], np.sqrt(s2), rng)
        variance = 1 / (counts / s2 + 1 / t2)
        mean = (np.bincount(clients, weights=whole, minlength=n_clients) / s2 + m / t2) * variance
        m = float(mean[seen].mean())
        t2 = max(float(((mean[seen] - m) ** 2 + variance[seen]).mean()), _VARIANCE_MIN)
        s2 = max(float(((whole - mean[clients]) ** 2 + variance[clients]).mean()), _VARIANCE_MIN)
        drawn = mean + np.sqrt(variance) * rng.standard_normal(n_clients)
        if turn >= _SETTLING:
            sums, squares, within = sums + mean, squares + mean**2 + variance, within + np.sqrt(s2)
    n_turns = _TURNS - _SETTLING
    deviation = np.sqrt(np.maximum(squares / n_turns - (sums / n_turns) ** 2, _VARIANCE_MIN))
    return Fitted(sums / n_turns, deviation, float(within / n_turns))


def _beyond(logs: Floats, means: Floats, deviation: float, rng: np.random.Generator) -> Floats:
    """Normal numbers, given that each exceeds its `logs`; `logs` itself where almost nothing exceeds it."""
    z = (logs - means) / deviation
    left = torch.from_numpy(np.minimum(z, _FAR) * np.sqrt(0.5)).erfc() / 2  # ndtr would give 0 from 8 on
    drawn: Floats = torch.special.ndtri(left * torch.from_numpy(1 - rng.random(len(logs)))).numpy()
    return np.maximum(means - deviation * drawn, logs)


_AT_ONCE_S = 1.0  # a client silent after this time never began
_PRIOR = 2.0  # this many counts of a client weigh as much as the average of the fleet
_LEAST_S = 1e-3
_FREE = 1e15  # bytes per second, where lines are a part of the work


@dataclass(frozen=True, slots=True)
class _Rows:
    """The clients of all attempts as columns. `told_s`: how long each was surely at work; a silence is noticed late."""

    clients: Indices
    open_s: Floats
    report_s: Floats
    train_s: Floats
    steps: Floats
    asked: Floats
    bytes_up: Floats
    bytes_down: Floats
    up: Floats
    told_s: Floats
    reported: Flags
    declined: Flags
    lost: Flags


def recorded_fleet(trace: Trace, seed: int, faults: Faults, waiting_factor: float = MARGIN) -> Fleet:
    """The fleet of a trace. Raises `ValueError` if no client has reported in it."""
    rows, n = _rows(trace), trace.clients
    zones = Zones(seed)
    is_measured = rows.reported & (rows.train_s > 0) & (rows.steps > 0)
    if is_measured.any():
        up, down = _line_rates(rows, is_measured)
        network = Network(_trait("down", seed, down, n), _trait("up", seed, up, n), 0.0)
        speed = Speed(_trait("speed", seed, _steps(rows, is_measured, network, n), n), "step")
    else:
        network = Network(_free("down", seed), _free("up", seed), 0.0)
        speed = Speed(_trait("speed", seed, _work(rows), n), "work")
    return Fleet(
        seed, speed, network, _presence(trace, seed, zones), _dropouts(rows, n, seed, zones), faults, waiting_factor
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of some quantity, as `fit` takes them."""

    clients: Indices
    values: Floats
    is_cut: Flags


def _trait(name: str, seed: int, measured: _Measured, n: int) -> Trait:
    fitted = fit(measured.clients, np.log(measured.values), measured.is_cut, n)
    if fitted is None:
        raise ValueError(
            "no client has reported in this trace, so it does not show how long devices take; record a run with reports"
        )
    return _trait_of(name, seed, fitted)


def _trait_of(name: str, seed: int, fitted: Fitted) -> Trait:
    return Trait(name, seed, fitted.mean, fitted.deviation, np.array([fitted.within]))


def _free(name: str, seed: int) -> Trait:
    return Trait(name, seed, np.log([_FREE]), np.zeros(1), np.zeros(1))


def _line_rates(rows: _Rows, is_measured: Flags) -> tuple[_Measured, _Measured]:
    """Bytes per second up and down. Without a measured upload, the rest of the time counts for both."""
    rest_s = rows.report_s - rows.train_s
    is_timed = is_measured & (rows.up > 0)
    if not is_timed.any():
        both = _rates(rows, rows.bytes_up + rows.bytes_down, rest_s, is_measured)
        return both, both
    rest_s = rest_s - rows.bytes_up / np.where(is_timed, rows.up, 1.0)
    up = _Measured(rows.clients[is_timed], rows.up[is_timed], np.zeros(int(is_timed.sum()), np.bool_))
    return up, _rates(rows, rows.bytes_down, rest_s, is_timed)


def _rates(rows: _Rows, n_bytes: Floats, seconds: Floats, is_known: Flags) -> _Measured:
    """Rates of the known clients that moved bytes; without any, as fast as possible."""
    is_known = is_known & (n_bytes > 0)
    if not is_known.any():
        return _Measured(np.zeros(1, np.int64), np.array([_FREE]), np.zeros(1, np.bool_))
    rates = n_bytes[is_known] / np.maximum(seconds[is_known], _LEAST_S)
    return _Measured(rows.clients[is_known], rates, np.zeros(len(rates), np.bool_))


def _steps(rows: _Rows, is_measured: Flags, network: Network, n: int) -> _Measured:
    """Seconds a step; for clients still at work when their round closed, a lower bound."""
    known = np.bincount(rows.clients[is_measured], weights=rows.asked[is_measured], minlength=n)
    counts = np.bincount(rows.clients[is_measured], minlength=n)
    typical = float(np.median(rows.asked[is_measured]))
    asked = np.where(counts > 0, known / np.maximum(counts, 1), typical)[rows.clients]
    devices = np.arange(n)
    down, up = network.down.usual(devices)[rows.clients], network.up.usual(devices)[rows.clients]
    bytes_down, bytes_up = (float(np.median(column[is_measured])) for column in (rows.bytes_down, rows.bytes_up))
    beyond_s = (rows.open_s - bytes_down / down - bytes_up / up) / np.maximum(asked, 1.0)
    is_cut = ~(rows.reported | rows.lost | rows.declined) & (beyond_s > 0)
    values = np.where(is_cut, beyond_s, rows.train_s / np.maximum(rows.steps, 1.0))
    return _chosen(rows, values, is_measured, is_cut)


def _work(rows: _Rows) -> _Measured:
    """Seconds from the opening to the report, or more than the attempt was open."""
    is_cut = ~(rows.reported | rows.lost | rows.declined) & (rows.open_s > 0)
    return _chosen(rows, np.where(is_cut, rows.open_s, rows.report_s), rows.reported & (rows.report_s > 0), is_cut)


def _chosen(rows: _Rows, values: Floats, is_measured: Flags, is_cut: Flags) -> _Measured:
    chosen = is_measured | is_cut
    return _Measured(rows.clients[chosen], np.maximum(values[chosen], 1e-9), is_cut[chosen])


def _dropouts(rows: _Rows, n: int, seed: int, zones: Zones) -> Dropouts:
    """By each client's counts and times, plus `_PRIOR` requests with the fleet's average result."""
    at_once = rows.declined | (rows.lost & (rows.told_s <= _AT_ONCE_S))
    at_work = rows.lost & ~at_once
    per_round, per_s = float(at_once.mean()), float(at_work.sum() / max(rows.told_s[~at_once].sum(), _LEAST_S))
    asked, silent = np.bincount(rows.clients, minlength=n), _sums(rows.clients, at_once, n)
    usual_s = float(rows.told_s.mean())
    lost, told_s = _sums(rows.clients, at_work, n), _sums(rows.clients, np.where(at_once, 0.0, rows.told_s), n)
    return Dropouts(
        seed=seed,
        zones=zones,
        per_round=(silent + _PRIOR * per_round) / (asked + _PRIOR),
        per_s=(lost + _PRIOR * per_s * usual_s) / np.maximum(told_s + _PRIOR * usual_s, _LEAST_S),
        by_hour=np.ones(1),
        weights=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    )


def _presence(trace: Trace, seed: int, zones: Zones) -> Presence:
    known = [attempt for attempt in trace.attempts if attempt.absent is not None]
    if not any(attempt.absent for attempt in known):
        return Always()
    hours = np.array([int(attempt.opened_at % (24 * HOUR_S) // HOUR_S) for attempt in known])
    waiting = np.array([float(attempt.waiting) for attempt in known])
    all_known = waiting + np.array([float(attempt.absent or 0) for attempt in known])
    overall = float(waiting.sum() / all_known.sum())
    # An hour with little data is like the whole day.
    prior = _PRIOR * float(all_known.mean())
    shares = (_sums(hours, waiting, 24) + prior * overall) / (_sums(hours, all_known, 24) + prior)
    return Hours(seed, zones, shares, 0.0, _factors(trace, known))


def _factors(trace: Trace, known: list[TracedAttempt]) -> Floats:
    """How much more or less often than others each client was present, where that is known."""
    there, absent = np.zeros(trace.clients), np.zeros(trace.clients)
    for attempt in known:
        np.add.at(there, [one.client for one in attempt.clients], 1.0)
        np.add.at(absent, list(attempt.absent_clients), 1.0)
    overall = float(there.sum() / (there.sum() + absent.sum()))
    return (there + _PRIOR * overall) / (there + absent + _PRIOR) / overall


def _sums(places: Indices, values: Floats | Flags, n: int) -> Floats:
    return np.bincount(places, weights=values.astype(np.float64), minlength=n).astype(np.float64)


def _rows(trace: Trace) -> _Rows:
    found = [(attempt, one) for attempt in trace.attempts for one in attempt.clients]
    open_s = np.array([attempt.open_s for attempt, _ in found])
    noticed_s = np.array([max(2.0, attempt.window_s / 10) for attempt, _ in found])
    report_s = _column(found, "report_s")
    reported, lost = np.isfinite(report_s), np.array([one.fate is Fate.LOST for _, one in found])
    declined = np.array([one.fate in (Fate.DECLINED, Fate.UNFIT) for _, one in found]) & ~reported
    last_s = np.where(lost, open_s - _column(found, "silent_s"), np.where(reported, report_s, open_s))
    return _Rows(
        clients=np.array([one.client for _, one in found], np.int64),
        open_s=open_s,
        report_s=report_s,
        train_s=np.nan_to_num(_column(found, "train_s")),
        steps=_column(found, "steps_done"),
        asked=_column(found, "steps_planned"),
        bytes_up=_column(found, "bytes_up"),
        bytes_down=_column(found, "bytes_down"),
        up=np.nan_to_num(_column(found, "upload_bytes_per_s")),
        told_s=np.clip(np.where(lost, last_s, np.minimum(last_s, open_s - noticed_s)), 0.0, None),
        reported=reported,
        declined=declined,
        lost=lost,
    )


def _column(found: list[tuple[TracedAttempt, TracedClient]], name: str) -> Floats:
    """NaN where it is None."""
    return np.array([getattr(one, name) for _, one in found], np.float64)
