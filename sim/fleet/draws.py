"""Random draws of a fleet: numbers that depend only on a seed, a purpose and the device.

The word of device d for one purpose is the d-th of SplitMix64's stream (`aggregation/sample_order.py`), which starts at
a SHA-256 of the seed and the purpose. So a device draws the same number whichever other devices are in the cohort, and
a fleet of a million costs nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch

from umbel.aggregation.run.report_times import Floats
from umbel.aggregation.sample_order import Words, epoch_seeds, mixed, sample_keys
from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.partition.partition import Indices

_UNIT = 2.0**-52
_FEISTEL_ROUNDS = 6


def words(seed: int, devices: Indices, *purpose: str | int) -> Words:
    """64 random bits for each device."""
    start = np.array([derive_seed(seed, "fleet", *purpose)], dtype=np.uint64)
    return sample_keys(start, devices.astype(np.uint64))


def daily_words(seed: int, devices: Indices, days: Indices, *purpose: str | int) -> Words:
    """64 random bits for each device on its day. `days`: integers, of the same shape as `devices`."""
    return epoch_seeds(words(seed, devices, *purpose), days)


def uniforms(bits: Words) -> Floats:
    """Evenly in (0, 1), without either end; one bit more, and the greatest would round to 1."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * _UNIT


def normals(bits: Words) -> Floats:
    """Of the standard normal distribution; greater words give greater numbers."""
    result: Floats = torch.special.ndtri(torch.from_numpy(uniforms(bits))).numpy()
    return result


def shuffled(seed: int, places: Indices, n: int, *purpose: str | int) -> Indices:
    """The values at these places of a permutation of 0 .. n - 1, without making the permutation.

    A Feistel network (Luby and Rackoff 1988) permutes the numbers of 2b bits, of which there are less than 4n; a value
    outside goes through again until it falls inside (cycle walking: Black and Rogaway 2002).
    """
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    keys = [np.uint64(derive_seed(seed, "fleet", *purpose, turn)) for turn in range(_FEISTEL_ROUNDS)]
    values = places.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= np.uint64(n)]
    return values.astype(np.int64)


def _feistel(values: Words, half: np.uint64, keys: list[np.uint64]) -> Words:
    low = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & low
    for key in keys:
        left, right = right, left ^ (mixed(right + key) & low)
    return (left << half) | right


def of_each(values: Floats, devices: Indices) -> Floats:
    """Device d takes the d-th of the values; they repeat after the last. A single value is for all devices."""
    chosen: Floats = values[devices % len(values)]
    return chosen


@dataclass(frozen=True, slots=True)
class Trait:
    """A positive quantity, log-normal around each device's own median, which is log-normal around a known median.

    Arrays are float64 (m,), for `of_each`.
    """

    name: str
    seed: int
    log_median: Floats  # known
    between: Floats  # sigma of a device's median
    within: Floats  # sigma from round to round
    tail: float | None = None  # exponent of a Pareto law that replaces `between`
    is_drawn: bool = False  # each device draws one of the m entries, the same in all such traits of a fleet

    def usual(self, devices: Indices) -> Floats:
        """Each device's own median."""
        bits = words(self.seed, devices, self.name)
        entries = self._entries(devices)
        if self.tail is not None:
            return np.exp(of_each(self.log_median, entries)) * (2 * (1 - uniforms(bits))) ** (-1 / self.tail)
        return np.exp(of_each(self.log_median, entries) + of_each(self.between, entries) * normals(bits))

    def today(self, devices: Indices, number: int, attempt: int) -> Floats:
        """Each device's value in one attempt at a round."""
        bits = words(self.seed, devices, self.name, "in", number, attempt)
        within = of_each(self.within, self._entries(devices))
        return self.usual(devices) * np.exp(within * normals(bits))

    def _entries(self, devices: Indices) -> Indices:
        if not self.is_drawn:
            return devices
        return (uniforms(words(self.seed, devices, "entry")) * len(self.log_median)).astype(np.int64)


def log_normal(name: str, seed: int, median: float, between: float, within: float) -> Trait:
    """A trait of a fleet of which only the median is known."""
    return Trait(name, seed, np.log([median]), np.array([between]), np.array([within]))
