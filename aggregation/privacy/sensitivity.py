"""How far one client can move a sum of integers: the bound that it enforces itself, and how to choose it.

A client contributes its levels k (`codec/rotated.py`). Without data they are zero, because the dither is below a step:
floor(0 + dither) = 0. (Levels of a fixed width have an offset. Then they are k0 = -1 or 0, which is public, and what
counts is k - k0.) The dither is not trusted: a client looks at the integers that it would send, and shortens its update
until the sum of their squares is within the bound (`contribution.py`). So for any data and any dither,

    L2 <= sqrt(bound),    L1 <= min(sqrt(d) L2, L2^2)

over d coordinates, by Cauchy and Schwarz, and because |k| <= k^2 for an integer.

The bound affects usefulness, not privacy: if it is too low, updates are shortened without need. An update y of norm c
(in steps), rounded with a dither that does not depend on it, becomes y_j + e_j, with E e = 0, independent by
coordinate, and

    sum of k^2 <= c^2 + d g(c / sqrt(d)) + sqrt(2 ln(1 / beta)) (c + sqrt(d) / 2),    g(m) = m (1 - m), from 1/2 on: 1/4

except with probability beta. Proof: k_j has two values, and so has its square. The mean of k_j^2 is y_j^2 + f (1 - f),
with f the fraction of y_j; f (1 - f) is at most g(|y_j|), and g is concave. The two values are at most 2 |y_j| + 1
apart, and Hoeffding's inequality adds their squares up to (2c + sqrt(d))^2. With 1/4 for g this is proposition 22 of
Kairouz, Liu and Steinke (The distributed discrete Gaussian mechanism for federated learning with secure aggregation,
ICML 2021). A coarse step, where most levels are zero, has a much smaller g. The sum never exceeds (c + sqrt(d))^2,
because each e is below 1.
"""

import math

from umbel.aggregation.kernels.arguments import UNIT
from umbel.aggregation.plans.masks import BOUND_MAX
from umbel.aggregation.stated_order import log2

BETA = 2.0**-20
_HALVINGS = 64
_LN_2 = 0.6931471805599453
_FLOAT32 = 2.0**-18  # how far rotation and clipping in float32 may raise a norm: some ten roundings


def rounded_bound(clip: float, n_values: int, beta: float = BETA) -> int:
    """The greatest sum of squares of `n_values` levels, for updates of L2 norm `clip` in steps.

    One update in 1 / `beta` exceeds it, and is shortened further. Raises `ValueError` for impossible numbers, or for a
    bound of 2^53 or more.
    """
    if not (clip > 0 and math.isfinite(clip) and n_values > 0 and 0 < beta <= 1):
        raise ValueError(
            "the norm must be finite and above zero, the number of values at least 1, and beta above 0 and at most 1; "
            f"they are {clip!r}, {n_values} and {beta!r}"
        )
    bound = _bound(clip, n_values, beta)
    if not bound <= BOUND_MAX:
        raise ValueError(f"updates with a norm of {clip:.3g} steps are too large for exact sums; take a larger step")
    return max(math.floor(bound), 1)


def clip_within(bound_squared: int, n_values: int, most: float = math.inf, beta: float = BETA) -> float:
    """The inverse of `rounded_bound`: the greatest L2 norm in steps, at most `most`, with this bound or a lower one.

    It is zero if the bound is too low even for rounding alone.
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
    """The bound above, as a float."""
    root = math.sqrt(n_values)
    norm = clip * (1 + _FLOAT32) + root / (2 * UNIT)  # fixed point moves each value by half a unit
    mean = norm * norm + n_values * _variance(norm / root)
    return min(mean + math.sqrt(-2 * _LN_2 * log2(beta)) * (norm + root / 2), (norm + root) * (norm + root))


def l1_bound(bound_squared: int, n_values: int) -> float:
    """The greatest sum of the magnitudes of `n_values` integers whose squares sum to `bound_squared` at most."""
    return min(math.sqrt(n_values) * math.sqrt(bound_squared), float(bound_squared))


def _variance(magnitude: float) -> float:
    """g: the greatest mean variance of rounding values of this mean magnitude, in squared steps."""
    return magnitude * (1 - magnitude) if magnitude < 0.5 else 0.25
