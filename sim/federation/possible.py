"""What a simulation refuses before its first round, and the error of one that cannot continue."""

from collections.abc import Iterator

import numpy as np

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.sim.data.population import Population


class SimulationError(Exception):
    """A simulation cannot continue: one sentence that says what to do."""


def require_possible(
    file: RunFile, layout: Layout, population: Population, *, measure_themselves: bool = False
) -> None:
    """Raise `SimulationError`, or `ValueError` for a model that cannot be private.

    `measure_themselves`: whether clients evaluate with their own code, and so say themselves if they have no data.
    """
    if file.privacy is not None:
        require_private_model(layout)
    measures = file.evaluation is not None or file.training.evaluate or any(one.evaluate for one in file.override)
    if measures and not measure_themselves and population.holdout_of(np.zeros(1, dtype=np.int64)) is None:
        raise SimulationError(
            "this run asks clients to measure the model, but they have no held-out data: set holdout = 0.1 in "
            "[partition], or leave out [evaluation] and training.evaluate (the simulator scores the model on the "
            "test set anyway)"
        )
    if file.training.evaluate_after and not measure_themselves:
        raise SimulationError(
            "evaluate_after asks each client to measure the model that it has trained, and only real clients do that: "
            "name an app in [clients], or leave evaluate_after out of [training]"
        )
    for rounds in _rounds_sections(file):
        counts_clients = rounds.weighting is Weighting.SAMPLES  # else the target counts draws
        for name, wanted in (("target", rounds.target if counts_clients else 1), ("minimum", rounds.minimum)):
            if wanted > population.n_clients:
                raise SimulationError(
                    f"rounds.{name} is {wanted:,}, but there are only {counted(population.n_clients, 'client')}: no "
                    f"round could get that many reports; set it to {population.n_clients} at most, or simulate more "
                    "clients"
                )


def _rounds_sections(file: RunFile) -> Iterator[RoundsSection]:
    """The sections from the beginning of each override, and after its end."""
    starts = {1, *(one.first_round for one in file.override), *((one.last_round or 0) + 1 for one in file.override)}
    return (file.rounds_of(number) for number in sorted(starts) if number <= file.rounds.count)
