"""How a metric differs between the clients of one round: the least and the greatest value, and quantiles. Pure.

Each client that has the metric counts once, whatever its samples. A quantile is one of the clients' own values: with
the n values in ascending order, the quantile of p percent is the value at place ceil(p n / 100), counted from 1. This
is the inverse of the empirical distribution function (definition 1 of Hyndman and Fan 1996, "Sample Quantiles in
Statistical Packages"). It neither adds nor divides floats, so every machine gets the same value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from umbel.aggregation.counts import most_reported

NAMES_MAX = 64  # metrics in one record; clients that make up names cannot make it grow


@dataclass(frozen=True, slots=True)
class Quantiles:
    """One metric over clients, in the metric's own unit. Of two clients with one value, the first by name is named."""

    clients: int  # that have the metric
    least: float
    least_client: str
    p10: float  # a tenth of the clients have at most this value
    median: float  # with an even number of clients, the lower of the two in the middle
    p90: float
    greatest: float
    greatest_client: str

    @classmethod
    def of(cls, values: Sequence[tuple[float, str]]) -> "Quantiles":
        """Of at least one client. `values`: each client's value and its name; their order has no effect."""
        ordered = sorted(values)
        n, (least, least_client) = len(ordered), ordered[0]
        greatest, greatest_client = min(ordered, key=lambda one: (-one[0], one[1]))
        p10, median, p90 = (ordered[_place(n, percent)][0] for percent in (10, 50, 90))
        return cls(n, least, least_client, p10, median, p90, greatest, greatest_client)


def quantiles(rows: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, Quantiles]:
    """Each metric's quantiles, in the order of the metrics' names. `rows`: each client's name and metrics.

    Beyond `NAMES_MAX` metrics, those that fewest clients have are left out.
    """
    measured = [(client, metrics) for client, metrics in rows if metrics]
    kept = most_reported(metrics for _, metrics in measured)[:NAMES_MAX]
    return {
        name: Quantiles.of([(metrics[name], client) for client, metrics in measured if name in metrics])
        for name in sorted(kept)
    }


def _place(n: int, percent: int) -> int:
    """From 0, of the quantile of `percent` of `n` values in ascending order."""
    return -(-n * percent // 100) - 1
