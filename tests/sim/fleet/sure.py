"""Bounds that samples of a distribution keep, but for one time in a thousand million."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def require_drawn(chances_below: Floats) -> None:
    """Fail unless a sample is of its distribution. `chances_below`: what that has below each value of the sample.

    By Dvoretzky, Kiefer and Wolfowitz, with Massart's constant.
    """
    ordered, n = np.sort(chances_below), len(chances_below)
    apart = max(np.abs(ordered - np.arange(n) / n).max(), np.abs(ordered - np.arange(1, n + 1) / n).max())
    assert apart < np.sqrt(np.log(2e9) / (2 * n))


def require_share(flags: NDArray[np.bool_], share: float) -> None:
    """Fail unless so many of independent flags are set as the share lets expect. By Hoeffding."""
    assert abs(float(flags.mean()) - share) < np.sqrt(np.log(2e9) / (2 * len(flags)))
