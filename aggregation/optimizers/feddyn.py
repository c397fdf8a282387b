"""The server's part of FedDyn (`algorithms/feddyn.py` has its formulas and the paper).

With s for -h / alpha, D for the mean change of a round, and c for the share of all clients that are in the mean, there
is no alpha in it:

    s' = s + c D;   x' = x + D + s'

D is weighted as the run's mean is. The paper's clients have equal weights.
"""

from functools import partial

from torch import Tensor

from umbel.aggregation.optimizers.server_optimizer import Moment, ServerOptimizer, Slots

_DRIFT = "drift"


def feddyn(population: int) -> ServerOptimizer:
    """`population`: the number of all clients, m."""
    return ServerOptimizer(partial(_step, population), {_DRIFT: 0.0})


def _step(population: int, change: Tensor, slots: Slots, at: Moment) -> Tensor:
    slots[_DRIFT] = after = slots[_DRIFT] + change * (min(at.n_clients, population) / population)
    return change.add_(after)
