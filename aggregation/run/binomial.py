"""The binomial distribution function, exact to rounding, for whole arrays at once and for counts in the millions.

P(B(n, p) <= k) is the regularised incomplete beta function I_{1-p}(n - k, k + 1) (Abramowitz and Stegun 26.5.24),
computed by its continued fraction (26.5.8) with the modified Lentz algorithm (Thompson and Barnett 1986). It needs some
sqrt(n) terms, where adding up the probabilities would need n of them for each entry.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_TERMS_MAX = 20_000
_TINY, _ENOUGH = 1e-300, 1e-14
_lgamma = np.vectorize(math.lgamma, otypes=[np.float64])


def at_most(k: ArrayLike, n: ArrayLike, p: ArrayLike) -> Floats:
    """P(B(n, p) <= k), by element; the three are broadcast. `k` may be negative, or n and more."""
    ks, ns, ps = np.broadcast_arrays(np.asarray(k, float), np.asarray(n, float), np.asarray(p, float))
    result = np.where((ks >= ns) | (ps <= 0), 1.0, 0.0)
    result[ks < 0] = 0.0
    inner = (ks >= 0) & (ks < ns) & (ps > 0) & (ps < 1)
    if inner.any():
        result[inner] = _incomplete_beta(1 - ps[inner], ps[inner], ns[inner] - ks[inner], ks[inner] + 1)
    return result


def _incomplete_beta(x: Floats, y: Floats, a: Floats, b: Floats) -> Floats:
    """I_x(a, b) with y = 1 - x, through whichever of I_x(a, b) = 1 - I_y(b, a) has the quick fraction."""
    swap = x > (a + 1) / (a + b + 2)
    x, y, a, b = (np.where(swap, second, first) for first, second in ((x, y), (y, x), (a, b), (b, a)))
    log_front = a * np.log(x) + b * np.log(y) + _lgamma(a + b) - _lgamma(a) - _lgamma(b)
    value = np.exp(log_front) / a * _fraction(x, a, b)
    return np.asarray(np.clip(np.where(swap, 1 - value, value), 0.0, 1.0), np.float64)


def _fraction(x: Floats, a: Floats, b: Floats) -> Floats:
    """1 / (1 + d_1 / (1 + d_2 / (1 + ...))) of 26.5.8."""
    c, d = np.ones_like(x), _away_from_zero(1 - (a + b) * x / (a + 1))
    d = 1 / d
    value = d.copy()
    for m in range(1, _TERMS_MAX):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / _away_from_zero(1 + even * d), _away_from_zero(1 + even / c)
        value *= c * d
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / _away_from_zero(1 + odd * d), _away_from_zero(1 + odd / c)
        value *= c * d
        if np.all(np.abs(c * d - 1) < _ENOUGH):
            break
    return value


def _away_from_zero(values: Floats) -> Floats:
    return np.where(np.abs(values) < _TINY, _TINY, values)
