"""The three fleets of `umbel bench window`, and runs of rounds on them by the simulator, in which nobody trains."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.tuning import TuningFacts, next_plan
from umbel.aggregation.types import LINE_RATE_MAX
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.recipe import LOSSES
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.federation.federation import Federation, World
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.rows import Row
from umbel.sim.federation.standing import beginning
from umbel.sim.federation.versions import ModelState
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.fates import CohortAsk, Fates
from umbel.sim.fleet.faults import Faults
from umbel.sim.fleet.fleet import Fleet
from umbel.sim.fleet.section import DropoutsSection, FleetSection, HoursSection, NetworkSection, SpeedSection

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
    """The devices of a `Fleet`, whose speed also depends on the hour of the day (see `Devices`)."""

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
        """What every device that waits at this hour would do in a round that asks it for one step."""
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
    """The attempts of one run. `rounds_s`: seconds from each round's beginning to its commit, all rounds together."""

    attempts: tuple[Row, ...]
    rounds_s: float

    @property
    def n_committed(self) -> int:
        return sum(attempt.committed for attempt in self.attempts)


def run_rounds(devices: DailyDevices, file: RunFile) -> WindowRun:
    """Simulate all rounds of the file. A round begins on its half hour, or when the one before has ended."""
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
    """Have the next round begin on its half hour, with the plan that is best then; when that is."""
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
    """An `Engine` that does no work: nobody's weights change."""

    name = "idle"

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        n = len(work.data)
        yield Changes(np.arange(n), torch.zeros(n, len(start)), np.zeros(n), np.zeros(n), np.zeros(n))

    def close(self) -> None:
        """Nothing is held."""
