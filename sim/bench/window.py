"""`umbel bench window`: the self-tuned window against the static 130 % rule, on three simulated fleets.

All rounds are simulated in virtual time, without training, on the same devices with the same random draws, target 100
and minimum 80. The longest window is the choice of a careful operator: 1.5 times the time that 95 % of the devices
needed in a pilot over a whole day.

- *static*: asks 130 % of the target, always with that window.
- *self-tuned*: the same run file with `self_tuning = true`; it starts without knowledge.
- *hindsight*: the best fixed window and over-selection, found with the fleet's true habits and the formulas of
  `aggregation/run/tuning.py`. No static rule can do better.
- *limit*: the same for each hour by itself. No rule that knows only the hour can do better.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn

from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.report_times import Curve, Floats
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.run.tuning import CONFIDENCE, Forecast, TuningFacts, foresee, next_plan
from umbel.aggregation.types import LINE_RATE_MAX
from umbel.sim.bench.report import BenchRow, Hold, Report
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.model import LOSSES
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.rows import Row
from umbel.sim.federation.world import World
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.fates import CohortAsk, Fates
from umbel.sim.fleet.faults import Faults
from umbel.sim.fleet.fleet import Fleet
from umbel.sim.fleet.section import DropoutsSection, FleetSection, HoursSection, NetworkSection, SpeedSection
from umbel.sim.results.plot_style import FAINT, INK, OURS, PEER, SLATE, dress, new_figure, write_figure

N_DEVICES = 1000
HOUR_S = 3600.0
EVERY_S = 1800.0  # a round begins every half hour, so that a few hundred rounds see several days and nights
_MEDIAN_S = 120.0  # seconds that a device works in a round
_AT_ONCE = NetworkSection(LINE_RATE_MAX, LINE_RATE_MAX, spread=0.0, jitter=0.0, latency_s=0.0)


@dataclass(frozen=True, slots=True)
class WindowFleet:
    """A fleet to run rounds on. `slowdown`: by hour of the day, what working times are multiplied by."""

    name: str
    section: FleetSection
    slowdown: Callable[[float], float] = lambda _hour: 1.0

    def devices(self, seed: int) -> "DailyDevices":
        return DailyDevices(build_fleet(self.section, seed, Path()), self.slowdown)


@dataclass(frozen=True, slots=True)
class DailyDevices:
    """`Devices` of a `Fleet` whose speed also depends on the hour of the day."""

    fleet: Fleet
    slowdown: Callable[[float], float]

    @property
    def faults(self) -> Faults:
        return self.fleet.faults

    def waiting(self, now: float, number: int, attempt: int, n_devices: int, n_wanted: int) -> Indices:
        return self.fleet.waiting(now, number, attempt, n_devices, n_wanted)

    def fates(self, devices: Indices, number: int, attempt: int, opened_at: float, ask: CohortAsk) -> Fates:
        speed, factor = self.fleet.speed, self.slowdown(opened_at / HOUR_S % 24)
        trait = replace(speed.trait, log_median=speed.trait.log_median + math.log(factor))
        fleet = replace(self.fleet, speed=replace(speed, trait=trait))
        return fleet.fates(devices, number, attempt, opened_at, ask)

    def fates_at(self, hour: int, window_s: float) -> Fates:
        """The fates of all devices that wait at this hour, if asked for one step."""
        now, zero = hour * HOUR_S, np.zeros(1, dtype=np.int64)
        who = self.waiting(now, hour, 1, N_DEVICES, N_DEVICES)
        return self.fates(who, hour, 1, now, CohortAsk(np.ones_like(who), 1, zero, zero, window_s))


def _night(hour: float) -> float:
    """1 at 3 o'clock, 0 at 15 o'clock."""
    return 0.5 * (1 + math.cos((hour - 3) / 24 * math.tau))


def _section(
    spread: float, jitter: float, dropouts: DropoutsSection, hours: HoursSection | None = None
) -> FleetSection:
    speed = SpeedSection(step_s=_MEDIAN_S, spread=spread, jitter=jitter)
    return FleetSection(speed=speed, network=_AT_ONCE, dropouts=dropouts, hours=hours)


def _lost_at_work(share: float, by_hour: tuple[float, ...] = ()) -> DropoutsSection:
    return DropoutsSection(per_round=share, by_hour=by_hour, download=0.0, training=1.0, upload=0.0)


# By day, devices of the third fleet are in use: slow, often lost, and few. By night they are on the charger.
_DAILY_LOSSES = tuple(0.30 - 0.27 * _night(hour) for hour in range(24))
FLEETS = (
    WindowFleet("homogeneous", _section(0.05, 0.15, _lost_at_work(0.05))),
    WindowFleet("heavy-tailed", _section(0.8, 0.6, _lost_at_work(0.08))),
    WindowFleet(
        "day/night",
        _section(0.3, 0.45, _lost_at_work(1.0, _DAILY_LOSSES), HoursSection(night=1.0, day=0.35, habit=0.0)),
        lambda hour: (240.0 - 150.0 * _night(hour)) / _MEDIAN_S,
    ),
)


@dataclass(frozen=True, slots=True)
class WindowRun:
    """The attempts of one run. `rounds_s`: from the beginning of rounds to their commits, summed."""

    attempts: tuple[Row, ...]
    rounds_s: float

    @property
    def n_committed(self) -> int:
        return sum(attempt.committed for attempt in self.attempts)


def run_rounds(devices: DailyDevices, file: RunFile) -> WindowRun:
    """Simulate all rounds of the file. A round begins on its half hour, or later, when the one before has ended."""
    model = nn.Linear(1, 1)
    state = ModelState.first(model.state_dict())
    world = World(_population(), devices, IdleEngine(), Meter(model, LOSSES["squared-error"], accuracy=False))
    run = Federation(world, beginning(file, state), state)
    rows, rounds_s, began = list[Row](), 0.0, _begin_round(run)
    for attempt in run.attempts():
        rows.append(Row.of(attempt.record, None, 0.0, attempt.standing.now, attempt.device_time))
        if attempt.record.committed:
            rounds_s += attempt.standing.now - began
            began = _begin_round(run)
    return WindowRun(tuple(rows), rounds_s)


def _begin_round(run: Federation) -> float:
    """Begin the next round on its half hour, with the best plan for that time; return that time."""
    standing, plan = run.standing, run.standing.state.plan
    began = max(standing.now, plan.number * EVERY_S)
    tuned = next_plan(
        standing.file, plan.number, 1, TuningFacts(standing.observations, standing.model.size_bytes, N_DEVICES), began
    )
    plan = replace(plan, window_s=tuned.window_s, over_selection=tuned.over_selection, tuned=tuned.tuned)
    run.standing = replace(standing, state=replace(standing.state, plan=plan, since=began))
    return began


def _population() -> ShardedPopulation:
    """A sample for each device, so that each takes one step."""
    samples = SampleSet(torch.zeros(N_DEVICES, 1), torch.zeros(N_DEVICES, dtype=torch.int64))
    return ShardedPopulation(samples, np.split(np.arange(N_DEVICES), N_DEVICES), samples)


class IdleEngine:
    """An `Engine` that changes no weights."""

    name = "idle"

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        n = len(work.data)
        yield Changes(np.arange(n), torch.zeros(n, len(start)), np.zeros(n), np.zeros(n), np.zeros(n))

    def close(self) -> None:
        """Nothing is held."""


TARGET, MINIMUM = 100, 80
STATIC_OVER_SELECTION = 1.3
GAIN_MIN = 1.05
_PILOT_SHARE, _PILOT_MARGIN = 0.95, 1.5
_PILOT_SEED, _TRUTH_SEED = 1001, 1002  # unlike the seeds of all runs
_TIMES = 200


@dataclass(frozen=True, slots=True)
class WindowContest:
    """One fleet, run in three ways with several seeds."""

    fleet: WindowFleet
    window_s: float
    hindsight: RoundPlan
    limit: float
    static: tuple[WindowRun, ...]
    tuned: tuple[WindowRun, ...]
    best: tuple[WindowRun, ...]


def measure(*, quick: bool, plot: Path | None) -> Report:
    """Run the benchmark, and draw it to `plot`. Raises `OSError` if the picture cannot be written."""
    n_rounds, seeds = (96, (1,)) if quick else (240, (1, 2, 3))
    contests = [hold_contest(fleet, n_rounds, seeds) for fleet in FLEETS]
    if plot is not None:
        draw_windows(contests, plot)
    notes = (
        f"{n_rounds} rounds, one each virtual half hour, {len(seeds)} seeds, target {TARGET}, minimum {MINIMUM}.",
        "Client time of use: the share of clients' working time that went into accepted reports.",
        f"Static: 130 % of the target are asked; the window is {_PILOT_MARGIN:g} x the time in which "
        f"{_PILOT_SHARE:.0%} of devices report, over a day.",
        "Self-tuned: its window is at most the static one; the time that clients waste while it learns is counted.",
        "Hindsight: the best static choice, for which the fleet's true behaviour must be known. Limit: the best choice "
        "for each hour, found in the same way.",
    )
    return Report("window", tuple(row for contest in contests for row in _rows(contest)), notes)


def hold_contest(fleet: WindowFleet, n_rounds: int, seeds: Sequence[int]) -> WindowContest:
    """Run one fleet in the three ways."""
    window_s = pilot_window_s(fleet)
    file, tuning_file = run_file(n_rounds, window_s, self_tuning=False), run_file(n_rounds, window_s, self_tuning=True)
    hindsight = best_static(fleet, file.round_plan(1, 1))
    best_file = run_file(n_rounds, hindsight.window_s, False, hindsight.over_selection)
    static, tuned, best = (
        tuple(run_rounds(fleet.devices(seed), one) for seed in seeds) for one in (file, tuning_file, best_file)
    )
    return WindowContest(fleet, window_s, hindsight, limit(fleet, file.round_plan(1, 1)), static, tuned, best)


def run_file(
    n_rounds: int, window_s: float, self_tuning: bool, over_selection: float = STATIC_OVER_SELECTION
) -> RunFile:
    rounds = RoundsSection(n_rounds, TARGET, MINIMUM, over_selection, window_s, self_tuning=self_tuning)
    return RunFile("window", rounds)


def pilot_window_s(fleet: WindowFleet) -> float:
    """The window that an operator would set after a pilot of a day."""
    devices = fleet.devices(_PILOT_SEED)
    needed_s = np.concatenate([devices.fates_at(hour, HOUR_S).step_s for hour in range(24)])
    return float(round(_PILOT_MARGIN * np.quantile(needed_s, _PILOT_SHARE)))


def best_static(fleet: WindowFleet, plan: RoundPlan) -> RoundPlan:
    """The window and over-selection with the greatest goodput over a day that commit often enough."""
    forecasts = _day(fleet, plan)
    p_commit, useful_s, total_s = (
        np.mean([getattr(one, name) for one in forecasts], axis=0) for name in ("p_commit", "useful_s", "total_s")
    )
    row, column = _best(p_commit, useful_s / total_s)
    n_asked, window_s = forecasts[0].n_asked[row], forecasts[0].window_s[column]
    return replace(plan, over_selection=float(n_asked) / plan.target, window_s=float(window_s))


def limit(fleet: WindowFleet, plan: RoundPlan) -> float:
    """The goodput over a day of the best choice for each hour."""
    useful_s = total_s = 0.0
    for forecast in _day(fleet, plan):
        choice = _best(forecast.p_commit, forecast.goodput)
        useful_s, total_s = useful_s + float(forecast.useful_s[choice]), total_s + float(forecast.total_s[choice])
    return useful_s / total_s


def _day(fleet: WindowFleet, plan: RoundPlan) -> list[Forecast]:
    return [foresee(plan, 0.0, true_curve(fleet, hour, plan.window_s), N_DEVICES) for hour in range(24)]


def _best(p_commit: Floats, goodput: Floats) -> tuple[int, int]:
    """The choice of the greatest goodput among those that commit often enough, or most often."""
    is_allowed = p_commit >= min(CONFIDENCE, float(p_commit.max()))
    row, column = np.unravel_index(int(np.argmax(np.where(is_allowed, goodput, -1.0))), goodput.shape)
    return int(row), int(column)


def true_curve(fleet: WindowFleet, hour: int, until_s: float) -> Curve:
    """The true behaviour of the fleet's devices at this hour."""
    times_s = np.linspace(until_s / _TIMES, until_s, _TIMES)
    fates = fleet.devices(_TRUTH_SEED).fates_at(hour, until_s)
    leave_s = np.minimum(fates.report_s, fates.lost_s)
    reported, left = ((column[None] <= times_s[:, None]).mean(axis=1) for column in (fates.report_s, leave_s))
    return Curve(times_s, reported, 1 - left, np.full(_TIMES, 1e12), until_s)


def _rows(contest: WindowContest) -> tuple[BenchRow, ...]:
    name, tuned, static = contest.fleet.name, contest.tuned, contest.static
    rule = f"static 130 %, {contest.window_s:.0f} s"
    hindsight = f"hindsight: {contest.hindsight.over_selection:.0%}, {contest.hindsight.window_s:.0f} s"
    ours = 100 * goodput(tuned)
    of_use, commits = f"{name}: client time of use", f"{name}: attempts that reach the minimum"
    return (
        BenchRow(of_use, ours, rule, 100 * goodput(static), "%", Hold(GAIN_MIN, sense=">=")),
        BenchRow(of_use, ours, hindsight, 100 * goodput(contest.best), "%"),
        BenchRow(of_use, ours, "limit: the best for each hour", 100 * contest.limit, "%"),
        BenchRow(
            commits, 100 * committed(tuned), rule, 100 * committed(static), "%", Hold(100 * CONFIDENCE, "ours", ">=")
        ),
        BenchRow(f"{name}: a round takes", minutes(tuned), rule, minutes(static), "min"),
        BenchRow(f"{name}: reports in a round", reports(tuned), rule, reports(static), "reports"),
    )


def goodput(runs: Sequence[WindowRun]) -> float:
    """Client seconds of accepted reports, over all client seconds."""
    attempts = [attempt for run in runs for attempt in run.attempts]
    return 1 - sum(attempt.wasted_s for attempt in attempts) / sum(attempt.busy_s for attempt in attempts)


def committed(runs: Sequence[WindowRun]) -> float:
    """Share of the attempts with the minimum of reports."""
    return sum(run.n_committed for run in runs) / sum(len(run.attempts) for run in runs)


def minutes(runs: Sequence[WindowRun]) -> float:
    """Virtual minutes from a round's beginning to its commit, failed attempts included."""
    return sum(run.rounds_s for run in runs) / 60 / sum(run.n_committed for run in runs)


def reports(runs: Sequence[WindowRun]) -> float:
    """Accepted reports in a committed round."""
    counts = [attempt.reported for run in runs for attempt in run.attempts if attempt.committed]
    return sum(counts) / len(counts)


_NIGHT = "#eef2f7"
_SMOOTHED_ROUNDS = 12  # six hours


def draw_windows(contests: Sequence[WindowContest], path: Path) -> None:
    figure = new_figure(13, 6.6, "A window that tunes itself, against the static 130 % rule")
    grid = figure.subplots(2, len(contests), sharex=True, squeeze=False)
    for i, contest in enumerate(contests):
        _use(grid[0][i], contest)
        _windows(grid[1][i], contest)
    grid[0][0].set_ylabel("client time of use", color=FAINT)
    grid[1][0].set_ylabel("window (static: the longest allowed)", color=FAINT)
    write_figure(figure, path)


def _use(axes: Axes, contest: WindowContest) -> None:
    for runs, color, name in ((contest.static, PEER, "static 130 %"), (contest.tuned, OURS, "self-tuned")):
        hours, shares = _smoothed_use(runs[0])
        axes.plot(hours, shares, color=color, lw=2.2, label=f"{name}: {goodput(runs):.1%}")
    best = goodput(contest.best)
    axes.axhline(best, color=SLATE, lw=1.2, ls=(0, (5, 3)), label=f"best static, in hindsight: {best:.1%}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0.4, 1.02)
    axes.legend(loc="lower right", frameon=False, fontsize=8.5, handlelength=1.6)
    _dress_hours(axes, contest, contest.fleet.name)


def _windows(axes: Axes, contest: WindowContest) -> None:
    attempts = contest.tuned[0].attempts
    hours = [attempt.round * EVERY_S / 3600 for attempt in attempts]
    axes.step(hours, [attempt.window_s for attempt in attempts], where="post", color=OURS, lw=1.4)
    axes.axhline(contest.window_s, color=PEER, lw=1.8)
    axes.axhline(contest.hindsight.window_s, color=SLATE, lw=1.2, ls=(0, (5, 3)))
    asked = np.mean([attempt.over_selection for attempt in attempts[len(attempts) // 4 :]])
    words = f"asks {asked:.0%} of the target (hindsight: {contest.hindsight.over_selection:.0%})"
    axes.text(0.02, 0.04, words, transform=axes.transAxes, fontsize=8.5, color=INK)
    axes.set_ylim(0, contest.window_s * 1.08)
    axes.yaxis.set_major_formatter("{x:.0f} s")
    axes.set_xlabel("virtual hours; nights are shaded", color=FAINT, fontsize=9)
    _dress_hours(axes, contest, "")


def _smoothed_use(run: WindowRun) -> tuple[list[float], list[float]]:
    """Hours, and the share of useful time over the last few attempts at each."""
    attempts = run.attempts
    hours = [attempt.round * EVERY_S / 3600 for attempt in attempts]
    wasted, total = (np.cumsum([0.0, *(getattr(a, name) for a in attempts)]) for name in ("wasted_s", "busy_s"))
    first = np.maximum(np.arange(1, len(attempts) + 1) - _SMOOTHED_ROUNDS, 0)
    return hours, list(1 - (wasted[1:] - wasted[first]) / (total[1:] - total[first]))


def _dress_hours(axes: Axes, contest: WindowContest, title: str) -> None:
    last = contest.tuned[0].attempts[-1].round * EVERY_S / 3600
    for midnight in range(0, int(last) + 24, 24):
        axes.axvspan(midnight - 3, midnight + 9, color=_NIGHT, lw=0, zorder=0)  # the middle of the night is 3 o'clock
    axes.set_xlim(0, last)
    axes.set_xticks(range(0, int(last) + 1, 24))
    dress(axes, title, axes.get_xlabel())
