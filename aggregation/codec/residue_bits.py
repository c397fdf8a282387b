"""How many bits a sum of levels needs modulo 2^bits (`modular.py`). Plans need this, and no tensors."""

import math

from umbel.aggregation.logarithms import ceil_log2
from umbel.aggregation.types import COHORT_MAX, LEVEL_MAX

SIGMAS = 6.0
ALARM_SHARE = 1e-4  # of coordinates near the edge: above it, the next round needs one bit more
_ROUNDING_VARIANCE = 1 / 6  # of floor(x + a uniform number), over x and the number, in squared steps


def bits_for(*, inverse_step: float, sigma_sum: float, n_clients: int, sigmas: float = SIGMAS) -> int:
    """The bits that hold the sum of `n_clients` vectors, up to `sigmas` standard deviations of a rotated coordinate.

    `sigma_sum`: the expected standard deviation of the sum's coordinates, in units of the weights. It may grow, so take
    the last round's times 1.5, for example. A rotated sum is Gaussian, and rounding adds n / 6 squared steps, so

        m = ceil(log2(2 t sqrt((sigma_sum / D)^2 + n / 6)))

    and at t = 6 one coordinate in 5e8 wraps. (Bonawitz, Salehi, Konecny, McMahan and Gruteser: Federated learning with
    autotuned communication-efficient secure aggregation, 2019, wrap a rotated sum in the same way.) Doubling the
    clients adds half a bit if their updates are independent, and one bit if they are equal. The result never exceeds
    the bits of n times the greatest level. Raises `ValueError` for an impossible cohort or expectation.
    """
    if not 1 <= n_clients <= COHORT_MAX:
        raise ValueError(f"a cohort has 1 to {COHORT_MAX} clients, not {n_clients}; aggregate in groups")
    if not (inverse_step > 0 and 0 <= sigma_sum < math.inf and sigmas > 0):
        raise ValueError("the step and sigmas must be positive, and sigma_sum must not be negative")
    in_steps = sigma_sum * inverse_step
    spread = math.sqrt(in_steps * in_steps + n_clients * _ROUNDING_VARIANCE)
    bits_max = (n_clients * LEVEL_MAX).bit_length() + 1
    return max(1, ceil_log2(min(2 * sigmas * spread, 2.0**bits_max)))
