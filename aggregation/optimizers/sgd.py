"""SGD: x' = x + rate D. With the rate 1 it is FedAvg (McMahan et al. 2017)."""

from torch import Tensor

from umbel.aggregation.optimizers.server_optimizer import Moment, ServerOptimizer, Slots


def sgd() -> ServerOptimizer:
    """It remembers nothing."""
    return ServerOptimizer(_step)


def _step(change: Tensor, _slots: Slots, at: Moment) -> Tensor:
    return change.mul_(at.rate)
