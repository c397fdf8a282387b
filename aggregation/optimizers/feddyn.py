"""The server's part of FedDyn (`algorithms/feddyn.py` has its formulas and the paper).

With s for -h / alpha, D for the mean change of a round, and c for the share of all clients' samples that is in the
mean, there is no alpha in it:

    s' = s + c D;   x' = x + D + s'

D is weighted by samples; the paper's clients have equal weights. So a client's drift always counts in s by its share of
all samples, and s stays a mean over all clients (`algorithms/scaffold.py` says why that must be so).
"""

from torch import Tensor

from umbel.aggregation.optimizers.server_optimizer import Moment, ServerOptimizer, Slots

_DRIFT = "drift"


def feddyn() -> ServerOptimizer:
    return ServerOptimizer(_step, {_DRIFT: 0.0})


def _step(change: Tensor, slots: Slots, at: Moment) -> Tensor:
    slots[_DRIFT] = after = slots[_DRIFT] + change * at.share
    return change.add_(after)
