"""How much noise each client of a private round adds, so that there is enough whatever others drop out or cheat.

A sum is revealed only if `least` clients or more are in it; `colluders` of them may have added no noise, or told the
coordinator theirs. So each adds

    variance per client = mu / (least - colluders)

for a sum that needs mu: ten clients, of whom seven must remain and three may collude, add 2.5 times what they would if
all could be trusted. That is the price of a promise that rests on nobody's word but the honest clients' own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from umbel.aggregation.types import COHORT_MAX

BOUND_MAX = (1 << 53) - 1  # what every reader of JSON holds exactly
VARIANCE_MIN, VARIANCE_MAX = 2.0**-20, 2.0**34
NOISE_VALUES_MAX = 1 << 40
_SLACK = 1 + 2.0**-50  # so that the quotient, times what divided it, is no less


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """What clients are told of a round's noise, and hold themselves to.

    `variance_per_client`: of the noise that each adds to each of its `n_values` levels, in squared steps.
    `bound_squared`: the greatest sum of squares of one client's levels. `least`: clients without whom no sum is
    revealed; `colluders`: of these, how many may have added no noise.
    """

    variance_per_client: float
    bound_squared: int
    n_values: int
    least: int
    colluders: int = 0

    def __post_init__(self) -> None:
        for name, most in (("bound_squared", BOUND_MAX), ("n_values", NOISE_VALUES_MAX), ("least", COHORT_MAX)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie between 1 and {most}, not {getattr(self, name)!r:.40}")
        require_honest(self.least, self.colluders)
        if not VARIANCE_MIN <= self.variance_per_client <= VARIANCE_MAX:
            raise ValueError(
                f"each client would add noise of a variance of {self.variance_per_client!r:.40} squared steps; it must "
                "lie between 2^-20 and 2^34. Take a larger step, or less noise"
            )

    @classmethod
    def of(cls, variance: float, bound_squared: int, n_values: int, *, least: int, colluders: int) -> NoisePlan:
        """`variance`: what the honest clients of the least cohort are to add together."""
        require_honest(least, colluders)
        share = max(variance / (least - colluders) * _SLACK, VARIANCE_MIN)
        return cls(share, bound_squared, n_values, least, colluders)

    def std_of_sum(self, n_clients: int) -> float:
        """The standard deviation of the noise in a sum of so many clients, in steps."""
        return math.sqrt(n_clients * self.variance_per_client)


def require_honest(least: int, colluders: int) -> None:
    """Raise `ValueError` if no honest client is sure to be in a sum of so many."""
    if not 0 <= colluders < least:
        raise ValueError(
            f"colluders must lie between 0 and {least - 1}, fewer than the {least} clients of the smallest sum, not "
            f"{colluders!r:.40}"
        )
