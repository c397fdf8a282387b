"""The fleets of `umbel bench window`: how long each device works, who never reports, and who waits at what hour.

One draw gives a whole round: the same seed, round and attempt give every device the same fate whatever is asked of it,
so that two ways to run a round are compared on the same luck.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import ClientId

Floats = NDArray[np.float64]
HOUR_S = 3600.0
SAMPLES = 100  # announced by every device


@dataclass(frozen=True, slots=True)
class Habits:
    """What devices are like at one hour. `median_s` and `sigma`: of log-normal working times.

    `dropping`: share of those that never report, lost at an even moment of their work; `waiting`: share that is there.
    """

    median_s: float
    sigma: float
    dropping: float
    waiting: float = 1.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """`spread`: log-normal sigma of the devices' own speeds, which stay; `habits`: what they are like at an hour."""

    name: str
    n_devices: int
    spread: float
    habits: Callable[[float], Habits]

    def round_of(self, seed: int, number: int, attempt: int, now: float) -> "Fates":
        """What every device would do in an attempt that begins now."""
        habits = self.habits(now / HOUR_S % 24)
        speeds = np.random.default_rng(derive_seed(seed, self.name, "speeds")).lognormal(0, self.spread, self.n_devices)
        rng = np.random.default_rng(derive_seed(seed, self.name, number, attempt))
        work_s = habits.median_s * speeds * rng.lognormal(0, habits.sigma, self.n_devices)
        drops = rng.random(self.n_devices) < habits.dropping
        lost_s = np.where(drops, work_s * rng.random(self.n_devices), np.inf)
        return Fates(work_s, lost_s, rng.random(self.n_devices) < habits.waiting)


@dataclass(frozen=True, slots=True)
class Fates:
    """Of every device, in one attempt: seconds until it would report and until it is lost, and whether it waits."""

    work_s: Floats
    lost_s: Floats
    waits: NDArray[np.bool_]

    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(Candidate(device_name(int(i)), SAMPLES) for i in np.flatnonzero(self.waits))


def device_name(index: int) -> ClientId:
    return ClientId(f"d{index:05}")


def device_index(client: ClientId) -> int:
    return int(client[1:])


def _homogeneous(_hour: float) -> Habits:
    return Habits(median_s=120.0, sigma=0.15, dropping=0.05)


def _heavy_tailed(_hour: float) -> Habits:
    return Habits(median_s=120.0, sigma=0.6, dropping=0.08)


def _day_night(hour: float) -> Habits:
    """On the charger at night: quick, faithful and many; in use by day. The turning points are 3 and 15 o'clock."""
    night = 0.5 * (1 + math.cos((hour - 3) / 24 * 2 * math.pi))
    return Habits(median_s=240.0 - 150.0 * night, sigma=0.45, dropping=0.30 - 0.27 * night, waiting=0.35 + 0.65 * night)


FLEETS = (
    Fleet("homogeneous", 1000, 0.05, _homogeneous),
    Fleet("heavy-tailed", 1000, 0.8, _heavy_tailed),
    Fleet("day/night", 1000, 0.3, _day_night),
)
