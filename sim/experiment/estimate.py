"""Numbers for people: a mean over seeds with its confidence, and spans of virtual time in a fitting unit."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Unit(NamedTuple):
    """`name`: in a picture; `sign`: after a number; `seconds`: how long it is."""

    name: str
    sign: str
    seconds: float


_UNITS = (
    Unit("seconds", "s", 1.0),
    Unit("minutes", "min", 60.0),
    Unit("hours", "h", 3600.0),
    Unit("days", "days", 86_400.0),
)
_UNITS_MIN = 2.0  # of a unit, before it is better than the smaller one


def unit_of(spans_s: Iterable[float]) -> Unit:
    """In which the longest of these is best said; seconds where there is none."""
    longest = max(spans_s, default=0.0)
    return next((unit for unit in reversed(_UNITS) if longest >= _UNITS_MIN * unit.seconds), _UNITS[0])


def in_unit(span_s: float, unit: Unit) -> str:
    """With three digits: `4.75 s`, `12.3 min`, `311 h`."""
    number = span_s / unit.seconds
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{digits}f} {unit.sign}"
