"""Momentum and Nesterov's momentum over rounds.

m' = beta m + D
momentum   x' = x + rate m'              FedAvgM: Hsu, Qi, Brown 2019, "Measuring the Effects of Non-Identical Data
                                         Distribution for Federated Visual Classification", section 4.3
nesterov   x' = x + rate (D + beta m')   Sutskever et al. 2013, eq. 4, as torch.optim.SGD has it; DiLoCo's outer
                                         step (Douillard et al. 2023, algorithm 1)
"""

from functools import partial

from torch import Tensor

from umbel.aggregation.optimizers.server_optimizer import Moment, ServerOptimizer, Slots

_M = "momentum"


def momentum(beta: float, *, nesterov: bool = False) -> ServerOptimizer:
    """`beta`: how much of the momentum lasts from round to round, 0 up to 1."""
    return ServerOptimizer(partial(_step, beta, nesterov), {_M: 0.0})


def _step(beta: float, nesterov: bool, change: Tensor, slots: Slots, at: Moment) -> Tensor:
    slots[_M] = after = (slots[_M] * beta).add_(change)
    direction = change.add_(after * beta) if nesterov else after.clone()
    return direction.mul_(at.rate)
