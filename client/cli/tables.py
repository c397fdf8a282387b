"""Tables that fit a terminal's width, and numbers and times for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.text import Text

from umbel.client.printable import printable

_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """`worth`: places are given out in this order. `least`: how many characters it may be cut to, None where it must
    stay whole.
    """

    head: str
    cells: Sequence[Text]
    worth: int
    least: int | None = None

    @property
    def wanted(self) -> int:
        """How wide it is when nothing is cut."""
        return max(len(self.head), *(cell.cell_len for cell in self.cells), 0)

    @property
    def needed(self) -> int:
        return self.wanted if self.least is None else min(self.least, self.wanted)


def table_lines(columns: Sequence[Column], width: int) -> list[Text]:
    """The heads and the rows."""
    widths = _widths(columns, width)
    shown = [(columns[place], widths[place]) for place in sorted(widths)]
    heads = [Text(column.head, "bold") for column, _ in shown]
    rows = zip(*(column.cells for column, _ in shown), strict=True)
    return [_line(cells, [width for _, width in shown]) for cells in (heads, *rows)]


def _widths(columns: Sequence[Column], width: int) -> dict[int, int]:
    """The columns that fit, by their place; what is left over goes to those that were cut."""
    left, widths = width + _GAP, dict[int, int]()
    by_worth = sorted(range(len(columns)), key=lambda place: -columns[place].worth)
    for place in by_worth:
        if columns[place].needed + _GAP <= left:
            widths[place] = columns[place].needed
            left -= columns[place].needed + _GAP
    for place in widths:
        more = min(left, columns[place].wanted - widths[place])
        widths[place] += more
        left -= more
    return widths


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text()
    for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        part = cell.copy()
        part.truncate(width, overflow="ellipsis", pad=place < len(widths) - 1)
        line.append_text(part)
        if place < len(widths) - 1:
            line.append(" " * _GAP)
    return line


def figure(value: float) -> str:
    """Four digits, also where the last are zeros, so that figures in a column can be compared."""
    return f"{value:#.4g}".rstrip(".")


def figures(means: Mapping[str, float]) -> str:
    """Each with its name, in the order of the names."""
    return "  ".join(f"{printable(name)} {figure(value)}" for name, value in sorted(means.items()))


def moment(unix_s: float) -> str:
    """Date and time, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%MZ")


def time_of_day(unix_s: float) -> str:
    """The time alone, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%MZ")
