"""Spans of virtual time for people: seconds of a quick round, days of a long run."""

from collections.abc import Iterable
from typing import NamedTuple


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
