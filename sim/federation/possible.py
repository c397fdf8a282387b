"""What a simulation refuses before its first round, and the error of one that cannot continue."""

import numpy as np

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.phrases import counted
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.run.file import RunFile
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
    if file.training.inexactness and not measure_themselves:
        raise SimulationError(
            "inexactness asks each client for the gradient of the model that it has trained, and only real clients "
            "compute that: name an app in [clients], or leave inexactness out of [training]"
        )
    for name, wanted in file.clients_needed():
        if wanted > population.n_clients:
            raise SimulationError(
                f"rounds.{name} is {wanted:,}, but there are only {counted(population.n_clients, 'client')}: no round "
                f"could get that many reports; set it to {population.n_clients} at most, or simulate more clients"
            )
