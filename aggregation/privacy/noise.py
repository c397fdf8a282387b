"""The noise of a private round's sum: what it is charged as, and the bits that hold it."""

import math

from umbel.aggregation.codec.residue_bits import SIGMAS
from umbel.aggregation.logarithms import ceil_log2
from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.privacy.accounting import PublishedSum
from umbel.aggregation.types import RESIDUE_BITS_MAX

_ROUNDING_VARIANCE = 1 / 4  # of rounding one value, at most, in squared steps


def release_of(noise: NoisePlan) -> PublishedSum:
    """The round's sum in the worst case: what it is charged as."""
    return PublishedSum(
        noise.variance_per_client * (noise.least - noise.colluders), noise.bound_squared, noise.n_values
    )


def noisy_bits(
    noise: NoisePlan, *, inverse_step: float, sigma_sum: float, n_clients: int, sigmas: float = SIGMAS
) -> int:
    """How many bits hold a coordinate of the sum of `n_clients`, noise included, up to so many deviations.

    `sigma_sum`: as `modular.bits_for` has it, the standard deviation that the sum is expected to have without
    noise, in units of the weights. The noise's variance is added to that of the sum in steps, and to that of the
    rounding. Raises `ValueError` if they are more than 32.
    """
    if not (n_clients >= 1 and inverse_step > 0 and 0 <= sigma_sum < math.inf and sigmas > 0):
        raise ValueError("clients, the step and sigmas must be positive, and sigma_sum must not be negative")
    in_steps = sigma_sum * inverse_step
    variance = in_steps * in_steps + n_clients * (_ROUNDING_VARIANCE + noise.variance_per_client)
    bits = max(1, ceil_log2(min(2 * sigmas * math.sqrt(variance), 2.0**1000)))
    if bits > RESIDUE_BITS_MAX:
        raise ValueError(f"the sum and its noise take {bits} bits, more than {RESIDUE_BITS_MAX}; take a larger step")
    return bits
