"""The weights of clients in rounds with devices: drawn, late and lost as in any simulation, by the coordinator's code.

The model has one number for each client, and client i adds 1 to number i. So the mean change of a round consists of the
weights of its clients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.types import LINE_RATE_MAX
from umbel.sim.bench.sampling.errors import Floats
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.model import LOSSES
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.world import World
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.section import DropoutsSection, FleetSection, NetworkSection, SpeedSection

BATCH_SIZE = 10
_AT_ONCE = NetworkSection(LINE_RATE_MAX, LINE_RATE_MAX, spread=0.0, jitter=0.0, latency_s=0.0)
_AT_WORK = DropoutsSection(download=0.0, training=1.0, upload=0.0)
_SPEED = SpeedSection(step_s=1.0)  # and a spread between devices, as by default
_FOREVER_S = 10 * 86_400.0  # no device is late for the end of the window


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Why clients that were drawn do not report. A pass over twice the samples takes twice the time."""

    name: str
    over_selection: float
    dropouts: DropoutsSection

    def fleet(self) -> FleetSection:
        return FleetSection(speed=_SPEED, network=_AT_ONCE, dropouts=self.dropouts)


CIRCUMSTANCES = (
    Circumstances("20 % lost, whatever they hold", 1.0, replace(_AT_WORK, per_round=0.2)),
    Circumstances("130 % asked, the fastest count", 1.3, _AT_WORK),
    Circumstances("losses grow with the work", 1.0, replace(_AT_WORK, per_hour=10.0)),
)


def weights_in_rounds(
    weighting: Weighting, sizes: Indices, target: int, circumstances: Circumstances, n_rounds: int, seed: int
) -> Floats:
    """The weight of each client in the mean of each committed round: (rounds, N)."""
    file = RunFile(
        "sampling",
        RoundsSection(n_rounds, target, 1, circumstances.over_selection, _FOREVER_S, weighting),
        seed,
        TrainingSection(local_epochs=1, batch_size=BATCH_SIZE),
        codec=CodecSection(name="float32"),
    )
    model = nn.Linear(len(sizes), 1, bias=False)
    nn.init.zeros_(model.weight)
    state = ModelState.first(model.state_dict())
    devices = build_fleet(circumstances.fleet(), seed, Path())
    world = World(_numbered(sizes), devices, UnitEngine(), Meter(model, LOSSES["squared-error"]))
    run = Federation(world, beginning(file, state), state)
    models = [state.master["weight"], *(one.model.master["weight"] for one in run.attempts() if one.record.committed)]
    weights: Floats = torch.cat([one.double() for one in models]).diff(dim=0).numpy()
    return weights


def _numbered(sizes: Indices) -> ShardedPopulation:
    """Clients with these numbers of samples, each of which is its client's number."""
    of_each = np.repeat(np.arange(len(sizes)), sizes)
    samples = SampleSet(torch.from_numpy(of_each)[:, None], torch.zeros(len(of_each), 1))
    return ShardedPopulation(samples, np.split(np.arange(len(of_each)), np.cumsum(sizes)[:-1]), samples)


class UnitEngine:
    """An `Engine` whose client i adds 1 to number i of the model."""

    name = "unit"

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        n = len(work.data)
        who = work.data.samples.inputs[torch.from_numpy(work.data.rows[work.data.starts[:-1]]), 0]
        yield Changes(np.arange(n), torch.eye(len(start))[who], np.zeros(n), np.zeros(n), np.zeros(n))

    def close(self) -> None:
        """Nothing is held."""
