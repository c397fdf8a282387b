"""The privacy cost of rounds with Skellam noise: Renyi divergences by order, their sum over rounds, (epsilon, delta).

**What is protected.** One client (a site or a device) in each round. An observer of every sum can hardly tell whether
the sum contains the client's data, or a contribution of zero. That is add-or-remove adjacency. It is public that the
client took part, and that it added noise. Exchanging some of a client's data, such as adding one patient, moves its
contribution at most twice as far: `PublishedSum` with four times the bound gives that cost. Values that are summed
beside the levels, without noise, are not covered.

**The bound** (Agarwal, Kairouz and Liu: The Skellam mechanism for differentially private federated learning, NeurIPS
2021), for noise of variance mu in the sum, contributions of L2 and L1 norm D2 and D1, in integers, and whole orders a
from 2 on:

    e(a) <= a D2^2 / (2 mu) + min( ((2a - 1) D2^2 + 6 D1) / (4 mu^2), 3 D1 / (2 mu) )

The first term is the Gaussian's. The second is the cost of integers, and vanishes as mu grows.

The samples of `skellam.py` are off by 2^-109 each. Over 2^40 samples that adds less than e^epsilon 2^-69 to delta.

mu counts only the noise of honest clients, in the smallest cohort whose sum is revealed (`plans/masks.py`).

**No amplification by sampling** is claimed, although a round may ask only some of the clients: the coordinator chooses
them, and is not trusted.

**Over rounds** divergences of one order add up. That holds even where a round's noise depends on what earlier rounds
have shown, if each round's cost at that order was fixed beforehand (Feldman and Zrnic: Individual privacy accounting
via a Renyi filter, NeurIPS 2021). Steps follow the rounds before, so a budget is an `Allowance`: one order, and a cost
for each round. A site, too, compares its rounds with its budget at one order (`Ledger.epsilon_within`): a coordinator
that chooses each round's noise by what it has seen must not choose the order as well. The ledger's epsilon is the least
over all orders, as usual. At the end of a budget they agree.

dp-accounting converts divergences to (epsilon, delta) (Canonne, Kamath and Steinke 2020, proposition 12). It is an
optional dependency, imported at first use.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from umbel.aggregation.privacy.sensitivity import l1_bound

Floats: TypeAlias = NDArray[np.float64]
ORDERS: tuple[int, ...] = (*range(2, 65), *(round(64 * 1.05**i) for i in range(1, 115)))  # to 16,683
_SLACK = 1 + 2.0**-30  # extra noise, for the rounding of float64 in a million rounds
_HALVINGS = 60


class AccountantMissing(RuntimeError):
    """The library that turns divergences into epsilon is not installed."""


@dataclass(frozen=True, slots=True)
class PublishedSum:
    """A sum of integers that is published with noise."""

    variance: float  # of the honest clients' noise in each integer
    bound_squared: int  # the greatest sum of squares of one client's integers
    n_values: int

    def __post_init__(self) -> None:
        if not (self.variance > 0 and math.isfinite(self.variance) and self.bound_squared > 0 and self.n_values > 0):
            raise ValueError("a published sum needs noise of a finite variance, a bound and values, all above zero")

    def divergences(self, orders: Sequence[int] = ORDERS) -> Floats:
        """The bound above, for each order."""
        a, mu, squared = np.asarray(orders, np.float64), self.variance, float(self.bound_squared)
        l1 = l1_bound(self.bound_squared, self.n_values)
        integers = np.minimum(((2 * a - 1) * squared + 6 * l1) / (4 * mu**2), 3 * l1 / (2 * mu))
        return np.asarray(a * squared / (2 * mu) + integers, np.float64)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The total cost of the rounds so far, at this `delta`.

    A round counts once its sum is revealed, even if no model is made from it.
    """

    delta: float
    n_rounds: int = 0
    divergences: tuple[float, ...] = field(default=(0.0,) * len(ORDERS), repr=False)

    def after(self, release: PublishedSum, n_rounds: int = 1) -> "Ledger":
        total = np.asarray(self.divergences) + n_rounds * release.divergences()
        return replace(self, n_rounds=self.n_rounds + n_rounds, divergences=tuple(total.tolist()))

    def plus(self, other: "Ledger") -> "Ledger":
        """The total of two ledgers, also of different runs, at this ledger's delta: divergences of one order add up."""
        total = np.asarray(self.divergences) + np.asarray(other.divergences)
        return replace(self, n_rounds=self.n_rounds + other.n_rounds, divergences=tuple(total.tolist()))

    @property
    def epsilon(self) -> float:
        """The epsilon of all rounds so far. Raises `AccountantMissing`."""
        return epsilon_of(self.divergences, self.delta)

    def epsilon_within(self, budget: float) -> float:
        """The epsilon of all rounds so far, at the one order that suits this budget best. Raises `AccountantMissing`.

        If it is within the budget, so is the true cost, however the noise of each round was chosen.
        """
        at = ORDERS.index(_shared(budget, self.delta)[0])
        return epsilon_of([self.divergences[at]], self.delta, [ORDERS[at]]) if self.n_rounds else 0.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """The greatest cost of one round: a `divergence` of this `order`."""

    order: int
    divergence: float

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of Gaussian noise with this cost: standard deviation over a contribution's L2 norm."""
        return math.sqrt(self.order / (2 * self.divergence))

    def variance(self, bound_squared: int, n_values: int) -> float:
        """The least variance of the sum's noise within this cost: the bound above, solved for mu."""
        squared, l1 = float(bound_squared), l1_bound(bound_squared, n_values)
        gaussian, second = self.order * squared / 2, ((2 * self.order - 1) * squared + 6 * l1) / 4
        by_square = (gaussian + math.sqrt(gaussian**2 + 4 * self.divergence * second)) / (2 * self.divergence)
        by_l1 = (gaussian + 1.5 * l1) / self.divergence
        return min(by_square, by_l1) * _SLACK


@lru_cache(maxsize=64)
def allowance(epsilon: float, delta: float, rounds: int) -> Allowance:
    """The greatest cost of each of `rounds` rounds that are (epsilon, delta)-private together.

    Raises `AccountantMissing`, and `ValueError` for a budget that no noise satisfies.
    """
    order, least = _shared(epsilon, delta)
    if rounds < 1 or epsilon_of([order * least], delta, [order]) > epsilon:
        raise ValueError(
            f"no amount of noise keeps {rounds} rounds within epsilon = {epsilon:g} at delta = {delta:g}; "
            "raise epsilon or delta"
        )
    return Allowance(order, order * least / rounds)


@lru_cache(maxsize=64)
def _shared(epsilon: float, delta: float) -> tuple[int, float]:
    """The order at which Gaussian noise needs the least, and the total divergence of order 1 that all rounds may cost.

    Rounds share this order, whatever their steps.
    """
    least, most = 2.0**-60, 2.0**60
    for _ in range(_HALVINGS):
        middle = math.sqrt(least * most)
        within = epsilon_of([order * middle for order in ORDERS], delta) <= epsilon
        least, most = (middle, most) if within else (least, middle)
    return _best_order([one * least for one in ORDERS], delta), least


def epsilon_of(divergences: Sequence[float], delta: float, orders: Sequence[int] = ORDERS) -> float:
    """The least epsilon that these divergences, by order, give at this delta. Raises `AccountantMissing`."""
    return _converted(divergences, delta, orders)[0]


def _best_order(divergences: Sequence[float], delta: float) -> int:
    return _converted(divergences, delta, ORDERS)[1]


def _converted(divergences: Sequence[float], delta: float, orders: Sequence[int]) -> tuple[float, int]:
    """Epsilon, and the order that gives it."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must be a probability between 0 and 1, not {delta!r}")
    try:
        from dp_accounting.rdp import compute_epsilon
    except ModuleNotFoundError as error:
        raise AccountantMissing(
            f"the package {error.name} is missing; in a clone of umbel: pip install -c constraints.txt '.[privacy]'"
        ) from error
    epsilon, order = compute_epsilon(orders, divergences, delta)
    return float(epsilon), int(order)
