"""LARS and LAMB: each tensor moves by a length that follows its own norm.

    lars   m' = beta m + rate trust D;  x' = x + m'                     with trust = ratio |x| / |D|
           You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1
    lamb   r = m^ / (sqrt(v^) + tau);   x' = x + rate trust r           with trust = |x| / |r|
           You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2,
           with m^ = m' / (1 - beta1^n) and v^ = v' / (1 - beta2^n) of FedAdam's moments

Both without weight decay. |.| is the L2 norm of the whole tensor, added in a stated order. Where one of the two norms
is zero, trust is 1.
"""

from functools import partial

from torch import Tensor

from umbel.aggregation.optimizers.adaptive import M, V, moments, power
from umbel.aggregation.optimizers.server_optimizer import LayerwiseRule, Moment, ServerOptimizer, Slots
from umbel.aggregation.stated_order import square_roots

_SPEED = "momentum"


def lars(beta: float, ratio: float) -> ServerOptimizer:
    """`ratio`: the length of a step, in norms of the tensor, at the rate 1."""

    def step(change: Tensor, slots: Slots, at: Moment, trust: float) -> Tensor:
        scaled = change.mul_(at.rate * trust)
        slots[_SPEED] = (slots[_SPEED] * beta).add_(scaled)
        return slots[_SPEED].clone()

    return ServerOptimizer(LayerwiseRule(lambda change, _slots, _at: change, step, ratio), {_SPEED: 0.0})


def lamb(beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """Adam's direction, at the length of the tensor."""
    direction = partial(_adams, beta1, beta2, tau)

    def step(change: Tensor, slots: Slots, at: Moment, trust: float) -> Tensor:
        found = direction(change, slots, at)
        slots[M], slots[V] = _moments(beta1, beta2, change, slots)
        return found.mul_(at.rate * trust)

    return ServerOptimizer(LayerwiseRule(direction, step), {M: 0.0, V: 0.0})


def trust_of(values_norm: float, direction_norm: float, ratio: float) -> float:
    """By what a tensor's step is multiplied."""
    return ratio * (values_norm / direction_norm) if values_norm > 0.0 and direction_norm > 0.0 else 1.0


def _adams(beta1: float, beta2: float, tau: float, change: Tensor, slots: Slots, at: Moment) -> Tensor:
    first, second = _moments(beta1, beta2, change, slots)
    first.div_(1.0 - power(beta1, at.n))
    return first.div_(square_roots(second.div_(1.0 - power(beta2, at.n))).add_(tau))


def _moments(beta1: float, beta2: float, change: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    return moments(beta1, lambda v, square: (v * beta2).add_(square * (1.0 - beta2)), change, slots)
