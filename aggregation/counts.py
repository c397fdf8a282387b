"""Counts that add up over clients, such as true positives or a histogram of scores: their bounds, and their exact sum.

A client reports counts by name, and each name has one or more whole numbers in a fixed order. Unlike means, sums of
counts say the same however the data are split over clients. `run/derived_metrics.py` makes figures of the sums, such as
a sensitivity.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import nsmallest
from typing import TypeAlias

from umbel.aggregation.types import METRICS_MAX, require_metric_name

NUMBERS_MAX = 4096  # in one report, over all names
COUNT_MAX = 1 << 40  # of one number of one client: a sum over 2^20 clients stays below 2^63
RECORD_NAMES_MAX = 256  # of metrics, and of counts, in one record; clients that make up names cannot make it grow
RECORD_NUMBERS_MAX = 4 * NUMBERS_MAX  # of all counts in one record
CountsByName: TypeAlias = Mapping[str, tuple[int, ...]]


def require_counts(counts: CountsByName) -> None:
    """Raise `ValueError` for counts that no report may have: too many, without numbers, or with a number out of bounds.

    At most 64 names with at most 4,096 numbers together, each from 0 to 2^40.
    """
    require_lengths({name: len(numbers) for name, numbers in counts.items()})
    for name, numbers in counts.items():
        if bad := [number for number in numbers if not 0 <= number <= COUNT_MAX]:
            raise ValueError(f"a number of the counts {name!r} is {bad[0]!r:.40}; it must lie between 0 and 2^40")


def require_lengths(lengths: Mapping[str, int]) -> None:
    """Raise `ValueError` for names of counts, each with how many numbers it has, that no report may have."""
    if len(lengths) > METRICS_MAX:
        raise ValueError(f"at most {METRICS_MAX} names of counts, not {len(lengths)}")
    for name, length in lengths.items():
        require_metric_name(name)
        if not 1 <= length <= NUMBERS_MAX:
            raise ValueError(f"the counts {name!r} must have 1 to {NUMBERS_MAX} numbers, not {length}")
    if (n_numbers := sum(lengths.values())) > NUMBERS_MAX:
        raise ValueError(f"the counts have {n_numbers} numbers together, and at most {NUMBERS_MAX} are allowed")


def sum_of_counts(reported: Iterable[CountsByName]) -> dict[str, tuple[int, ...]]:
    """The exact sums of clients' counts, by name in the order of the names.

    Counts of one name add up only if they have equally many numbers. If clients differ in that, the length that most of
    them have is added up, of equally frequent lengths the shortest; the others are left out. Beyond
    `RECORD_NAMES_MAX` names or `RECORD_NUMBERS_MAX` numbers, those that fewest clients report are left out. The order
    of clients has no effect.
    """
    rows, summed, n_left = [row for row in reported if row], dict[str, tuple[int, ...]](), RECORD_NUMBERS_MAX
    for name in most_reported(rows):
        numbers = _sum_of_one(rows, name)
        if len(numbers) <= n_left:
            summed[name] = numbers
            n_left -= len(numbers)
    return dict(sorted(summed.items()))


def most_reported(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """The `RECORD_NAMES_MAX` names that most clients report, the most frequent first. Equally frequent ones come in the
    order of the names.
    """
    frequencies = Counter(name for row in rows for name in row)
    return nsmallest(RECORD_NAMES_MAX, frequencies, key=lambda name: (-frequencies[name], name))


def _sum_of_one(rows: Iterable[CountsByName], name: str) -> tuple[int, ...]:
    found = [row[name] for row in rows if name in row]
    frequencies = Counter(map(len, found))
    length = min(frequencies, key=lambda one: (-frequencies[one], one))
    return tuple(map(sum, zip(*(numbers for numbers in found if len(numbers) == length), strict=True)))
