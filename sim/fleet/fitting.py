r"""What is known of each client from a few measurements, some of which say only "more than that".

The logarithm y of client i's j-th measurement is taken to be normal around the client's own mean, and that around the
fleet's:

    y_ij ~ N(mu_i, s^2),    mu_i ~ N(m, t^2).

With n_i measurements of mean a_i, what is known of mu_i is

    N((a_i n_i / s^2 + m / t^2) v_i, v_i),    v_i = 1 / (n_i / s^2 + 1 / t^2):

the fewer measurements, the more of the fleet. m, s and t are found by expectation and maximisation (Dempster, Laird and
Rubin 1977). A measurement cut off at c (Tobin 1958) counts with what is expected beyond it, with z = (c - mu_i) / s and
the normal hazard h = phi(z) / (1 - Phi(z)): mean mu_i + s h, variance s^2 (1 - h (h - z)).
"""

from dataclasses import dataclass

import numpy as np
import torch

from umbel.aggregation.binomial import Floats
from umbel.sim.data.partition import Indices
from umbel.sim.fleet.presence import Flags

_TURNS_MAX = 500
_SETTLED = 1e-5
_VARIANCE_MIN = 1e-6


@dataclass(frozen=True, slots=True)
class Fitted:
    """Of each client, what is known of its mean: `mean`, `deviation`, both (n,); `within`: s, alike for all."""

    mean: Floats
    deviation: Floats
    within: float


def fit(clients: Indices, logs: Floats, is_cut: Flags, n_clients: int) -> Fitted | None:
    """`logs`: of each measurement, or what it exceeds where `is_cut`. None without a measurement that is not cut."""
    if not len(logs) or is_cut.all():
        return None
    counts = np.bincount(clients, minlength=n_clients)
    seen = counts > 0
    overall = float(logs[~is_cut].mean())
    s2 = t2 = max(float(logs[~is_cut].var()) / 2, _VARIANCE_MIN)
    mean, known = np.full(n_clients, overall), np.full(n_clients, t2)
    for _ in range(_TURNS_MAX):
        expected, spread = _expected(logs, is_cut, mean[clients], np.sqrt(s2))
        sums = np.bincount(clients, weights=expected, minlength=n_clients)
        known = 1 / (counts / s2 + 1 / t2)
        mean = (sums / s2 + overall / t2) * known
        before, overall = overall, float(mean[seen].mean())
        t2 = max(float(((mean[seen] - overall) ** 2 + known[seen]).mean()), _VARIANCE_MIN)
        moved, s2 = s2, max(float(((expected - mean[clients]) ** 2 + known[clients] + spread).mean()), _VARIANCE_MIN)
        if abs(overall - before) < _SETTLED and abs(s2 - moved) < _SETTLED * s2:
            break
    return Fitted(mean, np.sqrt(known), float(np.sqrt(s2)))


def _expected(logs: Floats, is_cut: Flags, means: Floats, deviation: float) -> tuple[Floats, Floats]:
    """Each measurement's mean and variance, given that it exceeds what is said of it where it is cut."""
    z = (logs - means) / deviation
    log_hazard = -(z**2) / 2 - np.log(2 * np.pi) / 2 - torch.special.log_ndtr(torch.from_numpy(-z)).numpy()
    hazard = np.exp(np.minimum(log_hazard, 700.0))
    beyond = np.clip(1 - hazard * (hazard - z), 0.0, 1.0) * deviation**2
    return np.where(is_cut, means + deviation * hazard, logs), np.where(is_cut, beyond, 0.0)
