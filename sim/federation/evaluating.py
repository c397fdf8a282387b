"""Measure a run's model with the simulator's own meter, as clients would."""

import math

from umbel.aggregation.reports import EvaluationDone
from umbel.aggregation.run.model_state import ModelState
from umbel.sim.data.population import CohortData
from umbel.sim.federation.local_work import Meter
from umbel.sim.federation.world import World


def meter_of(world: World, model: ModelState) -> Meter:
    """The world's meter, with this model loaded."""
    assert world.meter is not None, "only clients of [clients] measure themselves"
    world.meter.load(model.layout.model.full_state(model.published))
    return world.meter


def evaluations(world: World, model: ModelState, held: CohortData) -> list[EvaluationDone | None]:
    """Each client's metrics of this model on its held-out data; None for a client without such data."""
    means = meter_of(world, model).of_each(held)
    return [
        EvaluationDone(n, {name: value for name, value in one.items() if math.isfinite(value)}) if n else None
        for n, one in zip(held.sizes.tolist(), means, strict=True)
    ]
