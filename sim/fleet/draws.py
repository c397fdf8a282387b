"""Random draws of a fleet: numbers that depend on a seed, their purpose and the device, and on nothing else.

The word of device d for one purpose is the d-th of SplitMix64's stream (`aggregation/sample_order.py`), whose start is
a SHA-256 of the seed and the purpose. So a device draws the same number whichever other devices are asked, and a fleet
of a million costs nothing until a device is asked.
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
    """64 random bits for each device on the day beside it: any integers, of the same shape."""
    return epoch_seeds(words(seed, devices, *purpose), days)


def uniforms(bits: Words) -> Floats:
    """Evenly in (0, 1), neither end included: with one bit more, the last would be rounded to 1."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * _UNIT


def normals(bits: Words) -> Floats:
    """Of the standard normal distribution; greater words give greater numbers."""
    result: Floats = torch.special.ndtri(torch.from_numpy(uniforms(bits))).numpy()
    return result


def shuffled(seed: int, places: Indices, n: int, *purpose: str | int) -> Indices:
    """What stands at these places of a permutation of 0 .. n - 1, without the permutation.

    A Feistel network (Luby and Rackoff 1988) permutes the numbers of 2b bits, of which there are less than 4n; whatever
    falls outside is sent through again until it falls inside (cycle walking: Black and Rogaway 2002).
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
    """Device d takes the d-th of the values; beyond the last they begin anew. A single one is everybody's."""
    chosen: Floats = values[devices % len(values)]
    return chosen


@dataclass(frozen=True, slots=True)
class Trait:
    """A positive quantity, log-normal around each device's own median, which is log-normal around what is known of it.

    `log_median`: of what is known; `between`: sigma of what is not known; `within`: sigma from round to round. All
    float64 (m,), as in `of_each`. `tail`: exponent of a Pareto law that takes the place of `between`. `is_drawn`:
    devices take one of the m entries by chance, the same entry in all traits of a fleet that do so.
    """

    name: str
    seed: int
    log_median: Floats
    between: Floats
    within: Floats
    tail: float | None = None
    is_drawn: bool = False

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
    """A trait of which nothing is known of any device beside the fleet's median."""
    return Trait(name, seed, np.log([median]), np.array([between]), np.array([within]))
