"""FedNova: each client's change counts by its direction, not by how many steps the client has done.

    x' = x + rate tau_eff sum_i p_i D_i / tau_i      with tau_eff = sum_i p_i tau_i

D_i is the change of client i after tau_i local steps, and p_i its share of the samples. Wang, Liu, Liang, Joshi, Poor
2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", eq. 6 and 7, for local SGD
without momentum, where the norm of a_i is tau_i. A client sends D_i / tau_i. The mean of what clients send is then
multiplied by tau_eff, and the server's optimizer steps with the product.

Only weights are divided: floats that are no running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from umbel.aggregation.stated_order import divisor

if TYPE_CHECKING:  # the state of a round is read without torch
    from torch import Tensor

COUNTED_STEPS_MAX = 1 << 23  # of one client: in a masked sum of weights up to 2^38, products stay below 2^61


def normalised(change: Tensor, n_steps: int) -> Tensor:
    """D / tau as float32, on any device."""
    return change / divisor(float(counted_steps(n_steps)), change)


def counted_steps(n_steps: int) -> int:
    """tau: the steps that count of those done, at most `COUNTED_STEPS_MAX`."""
    return min(n_steps, COUNTED_STEPS_MAX)


def effective_steps(weighted_steps: int, total_weight: int) -> float:
    """tau_eff, of the sum of weight times tau and the sum of weights: a quotient of integers, rounded once."""
    return float(Fraction(weighted_steps, total_weight))


def weighted_steps(clients: Iterable[tuple[int, int]]) -> int:
    """The sum of weight times tau. `clients`: the weight and the steps of each."""
    return sum(weight * counted_steps(n_steps) for weight, n_steps in clients)
