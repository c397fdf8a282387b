"""Clients without devices, where an experiment has no `[fleet]`: always present, done at once, and never lost.

So a round is that of the textbook (McMahan et al. 2017, algorithm 1): every client of the cohort does all of its work,
and every update counts. No time passes.
"""

from dataclasses import dataclass

import numpy as np

from umbel.aggregation.round.pace import MARGIN
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import LINE_RATE_MAX
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.fates import NEVER, CohortAsk, DeviceStage, Fates, LineRates
from umbel.sim.fleet.faults import Fault, Faults
from umbel.sim.fleet.fleet import waiting_devices
from umbel.sim.fleet.presence import Always
from umbel.sim.fleet.section import CorruptSection, MaliciousSection


@dataclass(frozen=True, slots=True)
class WithoutDevices:
    """The `Devices` of an experiment without `[fleet]`. `seed`: of the experiment.

    `draws_by_size`: whether rounds draw clients by their sample counts. Then all wait, also of very many, because a
    draw from an even part of them would be another.
    """

    seed: int
    draws_by_size: bool = False

    @property
    def faults(self) -> Faults:
        """No client sends invalid data or means harm."""
        return Faults(self.seed, CorruptSection(0.0), MaliciousSection(0.0))

    def waiting(self, now: float, number: int, attempt: int, n_devices: int, n_wanted: int) -> Indices:
        """The clients that wait, as of a fleet that is always present (`waiting_devices`)."""
        if self.draws_by_size:
            return np.arange(n_devices)
        seed = derive_seed(self.seed, "fleet")
        return waiting_devices(seed, Always(), MARGIN, now, (number, attempt), n_devices, n_wanted)

    def fates(self, devices: Indices, number: int, attempt: int, opened_at: float, ask: CohortAsk) -> Fates:
        """Every client has the model, has done all of its steps and has reported as soon as the round opens."""
        at_once, never = np.zeros(len(devices)), np.full(len(devices), NEVER)
        rate = np.full(len(devices), LINE_RATE_MAX)
        return Fates(
            devices=devices,
            ask=ask,
            lines=LineRates(rate, rate, rate, at_once),
            fetched_s=at_once,
            step_s=at_once,
            trained_s=at_once,
            steps_done=ask.steps,
            report_s=at_once,
            lost_s=never,
            back_s=never,
            stage=np.full(len(devices), DeviceStage.NONE, dtype=np.int8),
            fault=np.full(len(devices), Fault.NONE, dtype=np.int8),
        )
