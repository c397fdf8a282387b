"""A fleet: which devices wait for work at a moment, and what becomes of a cohort.

All of it depends only on the seed, the device and the attempt at a round; not on the other devices of the cohort
(except for stragglers), their order, or earlier questions. A fleet stores nothing for a device, so a million of them
cost nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from umbel.aggregation.round.pace import MARGIN
from umbel.aggregation.round.silence import cut_s
from umbel.aggregation.run.report_times import Floats
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import Trait, shuffled, uniforms, words
from umbel.sim.fleet.fates import (
    CohortAsk,
    Dropouts,
    Fates,
    LineRates,
    Losses,
    disturbed,
    training_room_s,
    undisturbed,
    without_partial_work,
)
from umbel.sim.fleet.faults import Faults
from umbel.sim.fleet.presence import Presence


@dataclass(frozen=True, slots=True)
class Stragglers:
    """An exact share of each cohort is too slow for all of its steps, as in Li et al. 2020.

    Unlike all else of a fleet, stragglers depend on the other devices of the cohort.
    """

    seed: int
    share: float  # of the cohort, rounded to whole devices
    least: float  # the share of a straggler's steps that fits into the window is drawn evenly from here
    most: float  # to here

    def step_s(
        self, devices: Indices, number: int, attempt: int, ask: CohortAsk, lines: LineRates, usual: Floats
    ) -> Floats:
        """Seconds that each device's steps take in this attempt. `usual`: without stragglers."""
        n_stragglers = round(self.share * len(devices))
        if not n_stragglers:
            return usual
        who = np.argsort(words(self.seed, devices, "straggler", number, attempt), kind="stable")[:n_stragglers]
        drawn = uniforms(words(self.seed, devices[who], "straggler's work", number, attempt))
        fitting = np.maximum(1.0, np.floor((self.least + (self.most - self.least) * drawn) * ask.steps[who]))
        room_s = np.maximum(training_room_s(ask, lines), 0.0)[who]
        slowed = usual.copy()
        slowed[who] = np.maximum(usual[who], room_s / (fitting + 0.5))  # half a step to spare: rounding takes none away
        return slowed


ALL_WAIT_MAX = 1000  # a coordinator lets this many devices wait (`umbel.server.devices.waiting.FLEET_HELD_MAX`)
_BLOCK_MIN = 1024


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a device needs for each step, for each sample, or for its whole work."""

    trait: Trait
    unit: Literal["step", "sample", "work"]

    def step_s(self, devices: Indices, number: int, attempt: int, ask: CohortAsk) -> Floats:
        seconds = self.trait.today(devices, number, attempt)
        match self.unit:
            case "step":
                return seconds
            case "sample":
                return seconds * ask.batch_size
            case "work":
                return seconds / ask.steps


@dataclass(frozen=True, slots=True)
class Network:
    """Bytes per second both ways. `latency_s`: of a round trip, equal for all devices."""

    down: Trait
    up: Trait
    latency_s: float

    def lines(self, devices: Indices, number: int, attempt: int) -> LineRates:
        return LineRates(
            self.down.today(devices, number, attempt),
            self.up.today(devices, number, attempt),
            self.up.usual(devices),
            np.full(len(devices), self.latency_s),
        )


class Devices(Protocol):
    """The devices of a federation: which wait, what becomes of a cohort, and which have faults.

    A `Fleet` draws it from a seed; a script can set it.
    """

    @property
    def faults(self) -> Faults: ...

    def waiting(self, now: float, number: int, attempt: int, n_devices: int, n_wanted: int) -> Indices:
        """As `Fleet.waiting`."""
        ...

    def fates(self, devices: Indices, number: int, attempt: int, opened_at: float, ask: CohortAsk) -> Fates:
        """As `Fleet.fates`. Equal arguments give equal results."""
        ...


def waiting_devices(
    seed: int,
    presence: Presence,
    factor: float,
    now: float,
    purpose: tuple[int, int],
    n_devices: int,
    n_wanted: int,
) -> Indices:
    """The devices of 0 .. n_devices - 1 that wait for an attempt, ascending. `purpose`: round and attempt.

    Of a small fleet, all present devices wait. Of a large one, as many as pace steering brings together
    (`aggregation/round/pace.py`): at most `factor` times `n_wanted`, drawn evenly from the present devices.
    """
    if n_devices <= ALL_WAIT_MAX:
        devices = np.arange(n_devices)
        return devices[presence.is_present(devices, now)]
    n_most = min(n_devices, math.ceil(factor * n_wanted))
    found: list[Indices] = []
    n_found, first = 0, 0
    while n_found < n_most and first < n_devices:
        places = np.arange(first, min(n_devices, first + max(_BLOCK_MIN, n_most)))
        devices = shuffled(seed, places, n_devices, "waiting", *purpose)
        there = devices[presence.is_present(devices, now)][: n_most - n_found]
        found.append(there)
        n_found, first = n_found + len(there), int(places[-1]) + 1
    return np.sort(np.concatenate([np.empty(0, np.int64), *found]))


@dataclass(frozen=True, slots=True)
class Fleet:
    """`waiting_factor`: of a large fleet, at most this many times the cohort wait for a round. `partial_work`: whether
    devices that cannot do all their steps in time send what they have. `notices_lost`: whether the coordinator notices
    when a device is lost, as if each device held a request open while it works.
    """

    seed: int
    speed: Speed
    network: Network
    presence: Presence
    dropouts: Dropouts
    faults: Faults
    waiting_factor: float = MARGIN
    stragglers: Stragglers | None = None
    partial_work: bool = True
    notices_lost: bool = False

    def waiting(self, now: float, number: int, attempt: int, n_devices: int, n_wanted: int) -> Indices:
        """The devices of 0 .. n_devices - 1 that wait for this attempt, which asks `n_wanted`: ascending."""
        purpose = (number, attempt)
        return waiting_devices(self.seed, self.presence, self.waiting_factor, now, purpose, n_devices, n_wanted)

    def fates(self, devices: Indices, number: int, attempt: int, opened_at: float, ask: CohortAsk) -> Fates:
        """What becomes of these devices, one of `ask` each, in an attempt that opens at `opened_at`."""
        step_s, lines = self.speed.step_s(devices, number, attempt, ask), self.network.lines(devices, number, attempt)
        if self.stragglers is not None:
            step_s = self.stragglers.step_s(devices, number, attempt, ask, lines, step_s)
        course, _ = undisturbed(ask, lines, step_s)
        losses = self.dropouts.losses(devices, (number, attempt), opened_at, course, ask.secure)
        leaves_s = self.presence.leaves_s(devices, opened_at, ask.window_s)
        is_first = (leaves_s < losses.lost_s) & (leaves_s < course.report_s)
        losses = Losses(
            np.where(is_first, leaves_s, losses.lost_s),
            np.where(is_first, np.inf, losses.away_s),
            np.where(is_first, course.stage_at(leaves_s), losses.stage).astype(np.int8),
        )
        course, steps = disturbed(ask, lines, step_s, course, losses)
        if not self.partial_work:
            course, steps = without_partial_work(ask, course, steps)
        return Fates(
            devices=devices,
            ask=ask,
            lines=lines,
            fetched_s=course.fetched_s,
            step_s=step_s,
            trained_s=course.trained_s,
            steps_done=steps,
            report_s=course.report_s,
            lost_s=losses.lost_s,
            back_s=losses.back_s,
            stage=losses.stage,
            fault=self.faults.of(devices, number, attempt),
            noticed_s=cut_s(ask.window_s) if self.notices_lost else np.inf,
        )
