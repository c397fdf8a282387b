"""What an experiment showed, as a table of words: for the console, and for a notebook."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from umbel.sim.federation.spans import Unit, in_unit, unit_of
from umbel.sim.results.estimate import Estimate
from umbel.sim.results.results import Point, Results

_WASTED_MIN = 0.005  # of less, the table says nothing
_HOUR_S = 3600.0


class Shown(NamedTuple):
    """A table: `header`, and of each point its cells. The first column names the points where there are several."""

    header: list[str]
    rows: list[list[str]]


def as_table(results: Results) -> Shown:
    """A point's last accuracy and loss, and what it took."""
    points = results.points
    unit = unit_of(point.virtual_hours.mean * _HOUR_S for point in points if point.virtual_hours is not None)
    columns: list[tuple[str, Callable[[Point], str]]] = [
        ("accuracy", lambda point: with_band(point.accuracy, "{:.1%}")),
        ("loss", lambda point: mean_of(point.loss, "{:.3f}")),
        ("rounds", lambda point: mean_of(point.rounds, "{:.0f}")),
        ("MB up, down", lambda point: f"{_megabytes(point.bytes_up)}, {_megabytes(point.bytes_down)}"),
        ("virtual time", lambda point: _span(point.virtual_hours, unit)),
    ]
    if any(point.wasted_share is not None and point.wasted_share.mean >= _WASTED_MIN for point in points):
        columns.append(("wasted", lambda point: mean_of(point.wasted_share, "{:.0%}")))
    columns.append(("took", lambda point: mean_of(point.wall_s, "{:.1f} s")))
    if results.target_accuracy is not None:
        columns.append(
            (f"to {results.target_accuracy:.0%}", lambda point: mean_of(point.rounds_to_target, "{:.0f} rounds"))
        )
    if len(points) > 1:
        columns.insert(0, ("", lambda point: point.label))
    return Shown([name for name, _ in columns], [[cell(point) for _, cell in columns] for point in points])


def as_text(shown: Shown) -> str:
    """In columns, for a fixed-width font."""
    lines = [shown.header, *shown.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_padded(line, widths, is_named=not shown.header[0])).rstrip() for line in lines)


def with_band(estimate: Estimate | None, form: str) -> str:
    """The mean, and half the width of its confidence interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return mean_of(estimate, form)
    return f"{form.format(estimate.mean)} ± {form.format((estimate.high - estimate.low) / 2)}"


def figure(value: float, *, is_share: bool = False) -> str:
    """Three digits, or all of a whole number."""
    if is_share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def mean_of(estimate: Estimate | None, form: str) -> str:
    """A dash where there is none, as where no seed has reached the target."""
    return "-" if estimate is None else form.format(estimate.mean)


def _megabytes(estimate: Estimate | None) -> str:
    return "-" if estimate is None else figure(estimate.mean / 1e6)


def _span(hours: Estimate | None, unit: Unit) -> str:
    return "-" if hours is None else in_unit(hours.mean * _HOUR_S, unit)


def _padded(cells: Sequence[str], widths: Sequence[int], *, is_named: bool) -> list[str]:
    return [
        cell.ljust(width) if is_named and not place else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
