"""FedAdagrad, FedYogi and FedAdam: a rate of its own for each value.

Reddi et al. 2021, "Adaptive Federated Optimization", algorithm 2:

    m' = beta1 m + (1 - beta1) D
    v' = v + D^2                                  adagrad
    v' = v - (1 - beta2) D^2 sign(v - D^2)        yogi
    v' = beta2 v + (1 - beta2) D^2                adam
    x' = x + rate m' / (sqrt(v') + tau)

v begins with `v0`, of which the paper asks tau^2 or more. With `corrected_from` = f (adam only) the rate in step n is
rate sqrt(1 - beta2^k) / (1 - beta1^k), with k = n + f - 1. f = 1: Kingma and Ba 2015, "Adam", section 2; f = 2:
Flower's FedAdam.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeAlias

from torch import Tensor

from umbel.aggregation.optimizers.server_optimizer import Moment, ServerOptimizer, Slots
from umbel.aggregation.stated_order import square_roots

M, V = "first_moment", "second_moment"
SecondMoment: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (v, D^2) -> v'


def adagrad(beta1: float, tau: float, v0: float) -> ServerOptimizer:
    """The second moment only grows, so steps become shorter."""
    return _adaptive(beta1, tau, v0, lambda v, square: v + square)


def yogi(beta1: float, beta2: float, tau: float, v0: float) -> ServerOptimizer:
    """The second moment falls slowly when changes become small."""
    return _adaptive(beta1, tau, v0, lambda v, square: v - (v - square).sign_().mul_(square * (1.0 - beta2)))


def adam(beta1: float, beta2: float, tau: float, v0: float, *, corrected_from: int | None = None) -> ServerOptimizer:
    """The second moment is a moving mean. `corrected_from`: k of the first step; None: the rate is not corrected."""
    rate = _plain if corrected_from is None else partial(_corrected, beta1, beta2, corrected_from)
    return _adaptive(beta1, tau, v0, lambda v, square: (v * beta2).add_(square * (1.0 - beta2)), rate)


def moments(beta1: float, second: SecondMoment, change: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """m' and v'."""
    return (slots[M] * beta1).add_(change * (1.0 - beta1)), second(slots[V], change * change)


@lru_cache(maxsize=8)
def power(base: float, n: int) -> float:
    """base^n by n products, because a library's power has other last bits on other machines."""
    found = 1.0
    for _ in range(n):
        found *= base
    return found


def _adaptive(
    beta1: float, tau: float, v0: float, second: SecondMoment, rate: Callable[[Moment], float] = lambda at: at.rate
) -> ServerOptimizer:
    def step(change: Tensor, slots: Slots, at: Moment) -> Tensor:
        slots[M], slots[V] = moments(beta1, second, change, slots)
        return (slots[M] / square_roots(slots[V].clone()).add_(tau)).mul_(rate(at))

    return ServerOptimizer(step, {M: 0.0, V: v0})


def _plain(at: Moment) -> float:
    return at.rate


def _corrected(beta1: float, beta2: float, first: int, at: Moment) -> float:
    k = at.n + first - 1
    return at.rate * math.sqrt(1.0 - power(beta2, k)) / (1.0 - power(beta1, k))
