"""A mean over clients that a few liars cannot move out of what the others say. Pure.

What each client measured is its own word. A plain mean over samples is worth nothing as soon as one client may name any
value and a large count, so what *decides* (when a run ends, which version is the best) is a trimmed mean (Tukey 1962;
Yin et al. 2018, "Byzantine-robust distributed learning", section 4): of n values, f = ceil(n / 10) at either end are
left out. If at most f clients lie, all that is left lies between values of honest clients. The rest is weighted by
sample counts, none taken for more than their median, or a liar in the midst of the others would pull the mean to its
own value.

Why not the median: where clients hold a handful of samples each, as phones do, its values are few and far off the mean.
Why a tenth: with more left out the same is true of this mean. Below three values nothing can be left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from umbel.aggregation.phrases import counted

_TRIMMED = 10  # one in so many is left out at either end, and at least one


@dataclass(frozen=True, slots=True)
class RobustMean:
    """`value`: the mean over all of `n_clients` but the `n_trimmed` least and as many of the greatest."""

    value: float
    n_clients: int
    n_trimmed: int

    @property
    def words(self) -> str:
        """How it was made: `the mean over 8 of 10 clients, without the 1 least and the 1 greatest`."""
        if not self.n_trimmed:
            return f"the mean over {counted(self.n_clients, 'client')}"
        left = self.n_clients - 2 * self.n_trimmed
        n = self.n_trimmed
        return f"the mean over {left} of {self.n_clients} clients, without the {n} least and the {n} greatest"


def robust_mean(values: Sequence[tuple[float, int]]) -> RobustMean:
    """The trimmed mean of at least one client's finite value and positive sample count."""
    n = len(values)
    n_trimmed = math.ceil(n / _TRIMMED) if n >= 3 else 0
    kept = sorted(values)[n_trimmed : n - n_trimmed]
    cap = median(count for _, count in kept) if n_trimmed else math.inf
    weights = [min(count, cap) for _, count in kept]
    mean = math.fsum(weight * value for weight, (value, _) in zip(weights, kept, strict=True)) / math.fsum(weights)
    return RobustMean(min(max(mean, kept[0][0]), kept[-1][0]), n, n_trimmed)  # rounding must not leave the range
