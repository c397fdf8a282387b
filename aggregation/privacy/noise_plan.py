"""How much noise each client of a round adds, so that there is enough whoever remains and whoever cheats.

A sum is revealed only if `least` clients or more are in it; `colluders` of them may have added no noise, or told the
coordinator theirs. So each adds

    variance per client = mu / (least - colluders)

for a sum that needs mu: ten clients, of whom seven must remain and three may collude, add 2.5 times what they would if
all could be trusted. That is the price of a promise that rests on nobody's word but the honest clients' own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from umbel.aggregation.codec.kernels.packing import BITS_MAX
from umbel.aggregation.codec.modular import SIGMAS
from umbel.aggregation.codec.rotated import COHORT_MAX
from umbel.aggregation.privacy.accounting import Release
from umbel.aggregation.privacy.sensitivity import BOUND_MAX
from umbel.aggregation.privacy.skellam import SAMPLES_MAX, VARIANCE_MAX, VARIANCE_MIN
from umbel.aggregation.stated_order import ceil_log2

_ROUNDING_VARIANCE = 1 / 4  # of rounding one value, at most, in squared steps
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
        for name, most in (("bound_squared", BOUND_MAX), ("n_values", SAMPLES_MAX), ("least", COHORT_MAX)):
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

    @property
    def release(self) -> Release:
        """The round's sum in the worst case: what it is charged as."""
        return Release(self.variance_per_client * (self.least - self.colluders), self.bound_squared, self.n_values)

    def std_of_sum(self, n_clients: int) -> float:
        """The standard deviation of the noise in a sum of so many clients, in steps."""
        return math.sqrt(n_clients * self.variance_per_client)

    def bits(self, *, inverse_step: float, sigma_sum: float, n_clients: int, sigmas: float = SIGMAS) -> int:
        """How many bits hold a coordinate of the sum of `n_clients`, noise included, up to so many deviations.

        `sigma_sum`: as `modular.bits_for` has it, the standard deviation that the sum is expected to have without
        noise, in units of the weights. The noise's variance is added to that of the sum in steps, and to that of the
        rounding. Raises `ValueError` if they are more than 32.
        """
        if not (n_clients >= 1 and inverse_step > 0 and 0 <= sigma_sum < math.inf and sigmas > 0):
            raise ValueError("clients, the step and sigmas must be positive, and sigma_sum must not be negative")
        in_steps = sigma_sum * inverse_step
        variance = in_steps * in_steps + n_clients * (_ROUNDING_VARIANCE + self.variance_per_client)
        bits = max(1, ceil_log2(min(2 * sigmas * math.sqrt(variance), 2.0**1000)))
        if bits > BITS_MAX:
            raise ValueError(f"the sum and its noise take {bits} bits, more than {BITS_MAX}; take a larger step")
        return bits


def require_honest(least: int, colluders: int) -> None:
    """Raise `ValueError` if no honest client is sure to be in a sum of so many."""
    if not 0 <= colluders < least:
        raise ValueError(
            f"colluders must lie between 0 and {least - 1}, fewer than the {least} clients of the smallest sum, not "
            f"{colluders!r:.40}"
        )
