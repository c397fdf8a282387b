"""A mean over seeds, and how sure it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and the bounds of the 95 % confidence interval about it (Student's t; Student 1908). Of one
    seed nothing is known but itself: the bounds are None.
    """

    mean: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate | None":
        """None of no values."""
        n = len(values)
        if not n:
            return None
        mean = math.fsum(values) / n
        if n == 1:
            return cls(mean, None, None, 1)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
        half = _student_t(n - 1) * deviation / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)


def _student_t(degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, degrees))
