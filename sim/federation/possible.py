"""Whether a run can be simulated with these clients, before it is begun."""

from collections.abc import Iterator

import numpy as np

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.privacy.compatible import require_private_model
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.sim.data.population import Population


class SimulationError(Exception):
    """A simulation cannot go on: one sentence that says what to do."""


def require_possible(file: RunFile, layout: Layout, population: Population) -> None:
    """Raise `SimulationError`, or `ValueError` for a model that cannot be private."""
    if file.privacy is not None:
        require_private_model(layout)
    measures = file.evaluation is not None or file.training.evaluate or any(one.evaluate for one in file.override)
    if measures and population.holdout_of(np.zeros(1, dtype=np.int64)) is None:
        raise SimulationError(
            "clients hold nothing back to measure the model on, as this run asks them to: set holdout = 0.1 in "
            "[partition], or leave [evaluation] and training.evaluate out (the model is scored in one place anyway)"
        )
    for rounds in _rounds_sections(file):
        counts_clients = rounds.weighting is Weighting.SAMPLES  # else the target counts draws
        for name, wanted in (("target", rounds.target if counts_clients else 1), ("minimum", rounds.minimum)):
            if wanted > population.n_clients:
                raise SimulationError(
                    f"rounds.{name} is {wanted:,}, and there are {counted(population.n_clients, 'client')}: no round "
                    f"would have so many reports; set it to {population.n_clients} at most, or simulate more clients"
                )


def _rounds_sections(file: RunFile) -> Iterator[RoundsSection]:
    """As they are where each override begins, and where it has ended."""
    starts = {1, *(one.first_round for one in file.override), *((one.last_round or 0) + 1 for one in file.override)}
    return (file.rounds_of(number) for number in sorted(starts) if number <= file.rounds.count)
