r"""What is known of each client from a few measurements, some of which say only "more than that".

The logarithm y of client i's j-th measurement is taken to be normal around the client's own mean, and that around the
fleet's:

    y_ij ~ N(mu_i, s^2),    mu_i ~ N(m, t^2).

With n_i measurements of mean a_i, what is known of mu_i is

    N((a_i n_i / s^2 + m / t^2) v_i, v_i),    v_i = 1 / (n_i / s^2 + 1 / t^2):

the fewer measurements, the more of the fleet. m, s and t are found by expectation and maximisation (Dempster, Laird and
Rubin 1977). Where a measurement is cut off at c (Tobin 1958), a number beyond c is drawn for it, anew in each turn, by
what is known so far (stochastic EM: Celeux and Diebolt 1985); what is known in the end is the mean of the later turns.
"""

from dataclasses import dataclass

import numpy as np
import torch

from umbel.aggregation.run.binomial import Floats
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.presence import Flags

_TURNS, _SETTLING = 200, 100
_VARIANCE_MIN = 1e-6
_FAR = 30.0  # standard deviations beyond which nothing is drawn


@dataclass(frozen=True, slots=True)
class Fitted:
    """Of each client, what is known of its mean: `mean`, `deviation`, both (n,); `within`: s, alike for all."""

    mean: Floats
    deviation: Floats
    within: float


def fit(clients: Indices, logs: Floats, is_cut: Flags, n_clients: int) -> Fitted | None:
    """`logs`: of each measurement, or what it exceeds where `is_cut`. None without a measurement that is not cut.

    Whatever is drawn, it is the same each time.
    """
    if not len(logs) or is_cut.all():
        return None
    rng, counts, whole = np.random.default_rng(0), np.bincount(clients, minlength=n_clients), logs.copy()
    seen = counts > 0
    m = float(logs[~is_cut].mean())
    s2 = t2 = max(float(logs[~is_cut].var()) / 2, _VARIANCE_MIN)
    drawn = np.full(n_clients, m)
    sums, squares, within = np.zeros(n_clients), np.zeros(n_clients), 0.0
    for turn in range(_TURNS):
        whole[is_cut] = _beyond(logs[is_cut], drawn[clients[is_cut]], np.sqrt(s2), rng)
        variance = 1 / (counts / s2 + 1 / t2)
        mean = (np.bincount(clients, weights=whole, minlength=n_clients) / s2 + m / t2) * variance
        m = float(mean[seen].mean())
        t2 = max(float(((mean[seen] - m) ** 2 + variance[seen]).mean()), _VARIANCE_MIN)
        s2 = max(float(((whole - mean[clients]) ** 2 + variance[clients]).mean()), _VARIANCE_MIN)
        drawn = mean + np.sqrt(variance) * rng.standard_normal(n_clients)
        if turn >= _SETTLING:
            sums, squares, within = sums + mean, squares + mean**2 + variance, within + np.sqrt(s2)
    n_turns = _TURNS - _SETTLING
    deviation = np.sqrt(np.maximum(squares / n_turns - (sums / n_turns) ** 2, _VARIANCE_MIN))
    return Fitted(sums / n_turns, deviation, float(within / n_turns))


def _beyond(logs: Floats, means: Floats, deviation: float, rng: np.random.Generator) -> Floats:
    """Normal numbers, given that each exceeds its `logs`; just that where all but nothing is below it."""
    z = (logs - means) / deviation
    left = torch.from_numpy(np.minimum(z, _FAR) * np.sqrt(0.5)).erfc() / 2  # ndtr would give 0 from 8 on
    drawn: Floats = torch.special.ndtri(left * torch.from_numpy(1 - rng.random(len(logs)))).numpy()
    return np.maximum(means - deviation * drawn, logs)
