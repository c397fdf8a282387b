"""What a device keeps, and what changes from round to round: its speed, its line."""

from dataclasses import dataclass

import numpy as np

from umbel.aggregation.run.binomial import Floats
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import normals, uniforms, words


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
