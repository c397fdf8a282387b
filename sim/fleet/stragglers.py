"""Stragglers: of the devices that are asked in an attempt at a round, a share that is too slow for all of its work."""

from dataclasses import dataclass

import numpy as np

from umbel.aggregation.run.binomial import Floats
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.draws import uniforms, words
from umbel.sim.fleet.fates import CohortAsk, Lines, training_room_s


@dataclass(frozen=True, slots=True)
class Stragglers:
    """`share`: of those asked, rounded to whole devices. Of a straggler's steps a share fits into the window, drawn
    evenly from `least` to `most`.

    Who it is hangs, unlike all else of a fleet, on who else is asked: the share is kept exactly, as in Li et al. 2020.
    """

    seed: int
    share: float
    least: float
    most: float

    def step_s(
        self, devices: Indices, number: int, attempt: int, ask: CohortAsk, lines: Lines, usual: Floats
    ) -> Floats:
        """Seconds that each device's steps take in this attempt. `usual`: were there no stragglers."""
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
