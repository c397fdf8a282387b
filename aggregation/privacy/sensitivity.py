"""What one client can change of a sum of integers: a bound that it keeps by construction, and how large to choose it.

A client's contribution are its levels k (`codec/quantize.py`, `codec/rotated.py`). Without data they are zero, for the
dither is below a step: floor(0 + dither) = 0. (Levels with an offset, those of a fixed width, are k0 = -1 or 0 then,
which everyone can work out; what counts there is k - k0.) Nothing about the dither is taken on trust: a client looks
at the integers that it would send, and takes less of its update until the sum of their squares is within the bound
(`contribution.py`). So whatever its data and the dither are,

    L2 <= sqrt(bound),    L1 <= min(sqrt(d) L2, L2^2)

over d coordinates: by Cauchy and Schwarz, and because |k| <= k^2 for an integer.

The bound itself is a matter of use, not of privacy: too low, and updates are cut short that were not too long. Rounded
with a dither that does not depend on it, an update y of norm c (in steps) becomes y_j + e_j, with E e = 0, independent
by coordinate, and

    sum of k^2 <= c^2 + d g(c / sqrt(d)) + sqrt(2 ln(1 / beta)) (c + sqrt(d) / 2),    g(m) = m (1 - m), from 1/2 on: 1/4

but with probability beta. For k_j has two values, and so has its square: the mean of k_j^2 is y_j^2 + f (1 - f), f the
fraction of y_j, which is at most g(|y_j|), and g is concave; the two values lie 2 |y_j| + 1 apart at most, and
Hoeffding's inequality adds their squares up to (2c + sqrt(d))^2. With 1/4 for g it is proposition 22 of Kairouz, Liu
and Steinke (The distributed discrete Gaussian mechanism for federated learning with secure aggregation, ICML 2021); a
coarse step, where most levels are zero, has a much smaller g. Nothing exceeds (c + sqrt(d))^2, as each e is below 1.
"""

from __future__ import annotations

import math

from umbel.aggregation.codec.kernels.quantizer import UNIT
from umbel.aggregation.logarithms import log2
from umbel.aggregation.plans.noise import BOUND_MAX

BETA = 2.0**-20
_HALVINGS = 64
_LN_2 = 0.6931471805599453
_FLOAT32 = 2.0**-18  # what the rotation and the clipping, in float32, may add to a norm: some ten roundings


def rounded_bound(clip: float, n_values: int, beta: float = BETA) -> int:
    """The bound for updates of L2 norm `clip`, in steps: the greatest sum of squares of `n_values` levels.

    One update in 1 / `beta` exceeds it, and is shortened a little further. Raises `ValueError` for numbers that cannot
    be, or a bound of 2^53 or more.
    """
    if not (clip > 0 and math.isfinite(clip) and n_values > 0 and 0 < beta <= 1):
        raise ValueError(f"a bound needs a norm above zero and values, not {clip!r} and {n_values}")
    bound = _bound(clip, n_values, beta)
    if not bound <= BOUND_MAX:
        raise ValueError(f"updates of a norm of {clip:.3g} steps are too long for exact sums; take a larger step")
    return max(math.floor(bound), 1)


def clip_within(bound_squared: int, n_values: int, most: float = math.inf, beta: float = BETA) -> float:
    """The inverse of `rounded_bound`: the greatest L2 norm, in steps, of which it gives `bound_squared` or less. It is
    `most` at most, and zero where the bound is less than what the rounding of an update of no length may need.
    """
    if math.isfinite(most) and most > 0 and math.floor(_bound(most, n_values, beta)) <= bound_squared:
        return most
    least, most = 0.0, math.sqrt(bound_squared)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        fits = math.floor(_bound(middle, n_values, beta)) <= bound_squared
        least, most = (middle, most) if fits else (least, middle)
    return least


def _bound(clip: float, n_values: int, beta: float) -> float:
    """The equation above."""
    root = math.sqrt(n_values)
    norm = clip * (1 + _FLOAT32) + root / (2 * UNIT)  # the fixed point of the rounding moves each value by half a unit
    mean = norm * norm + n_values * _variance(norm / root)
    return min(mean + math.sqrt(-2 * _LN_2 * log2(beta)) * (norm + root / 2), (norm + root) * (norm + root))


def l1_bound(bound_squared: int, n_values: int) -> float:
    """The greatest sum of the magnitudes of `n_values` integers whose squares sum to `bound_squared` at most."""
    return min(math.sqrt(n_values) * math.sqrt(bound_squared), float(bound_squared))


def _variance(magnitude: float) -> float:
    """g: the greatest mean variance of rounding values of this mean magnitude, in squared steps."""
    return magnitude * (1 - magnitude) if magnitude < 0.5 else 0.25
