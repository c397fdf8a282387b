"""How the command line prints: text, tables and JSON on standard output, one-sentence errors and the log on standard
error. In a file or a pipe no sentence is wrapped, and a table that must fit a width is as wide as COLUMNS says, or else
`PIPE_COLUMNS`.
"""

import logging
import os
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, NoReturn

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from umbel.aggregation.phrases import counted, some
from umbel.aggregation.run.records import RunView
from umbel.client.errors import ClientError, printable

PIPE_COLUMNS = 100
ERROR_STATUS = 1
FINAL_STATUS = 77  # EX_NOPERM of sysexits.h; units name it in RestartPreventExitStatus
_UNWRAPPED_COLUMNS = 1 << 16
_GAP = 2  # between two columns
_LEFT_OUT_NAMED = 8


def screen(shows_all: bool = False) -> Console:
    """Standard output: as wide as the terminal; unwrapped if it is no terminal, or if tables show all columns."""
    console = Console()
    return console if console.is_terminal and not shows_all else Console(width=_UNWRAPPED_COLUMNS)


def table_width(shows_all: bool) -> int:
    """The width that a table must fit: COLUMNS, the terminal's, or `PIPE_COLUMNS`."""
    if shows_all:
        return _UNWRAPPED_COLUMNS
    console = Console()  # its width is COLUMNS if that is a number
    return console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else PIPE_COLUMNS


def json_text(value: object) -> str:
    adapter: TypeAdapter[Any] = TypeAdapter(type(value))
    return adapter.dump_json(value).decode()


def print_json(value: object) -> None:
    typer.echo(json_text(value))


def print_result(value: object, text: str, as_json: bool) -> None:
    """Print `value` as JSON, or `text` for people."""
    if as_json:
        print_json(value)
    else:
        typer.echo(text)


def print_run(view: RunView, as_json: bool) -> None:
    rounds = f"{view.rounds_done} of {counted(view.rounds_planned, 'round')}"
    text = f"{printable(view.name)}: {view.status.value}, {rounds}. {printable(view.reason)}".strip()
    print_result(view, text, as_json)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> None:
    """Print a table. Cells may hold a peer's text. `width`: wrap them to fit it; None: the terminal's, or no limit."""
    table = Table(*heads, box=None)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    (screen() if width is None else Console(width=width)).print(table)


def print_columns(columns: Sequence["Column"], shows_all: bool) -> None:
    """Print a table that fits its width, and name the columns that have no room."""
    width = table_width(shows_all)
    left_out = left_out_words(columns, width)
    lines = [*table_lines(columns, width), *([] if left_out is None else [left_out])]
    screen(shows_all).print(Text("\n").join(lines))


@contextmanager
def one_sentence_errors() -> Generator[None]:
    """Turn errors that a person can act on into one sentence; bugs keep their traceback.

    The exit status is `FINAL_STATUS` if starting the client again cannot help, otherwise `ERROR_STATUS`.
    """
    try:
        yield
    except OSError as error:
        _exit_with(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error), error)
    except (ClientError, ValueError) as error:
        is_final = isinstance(error, ClientError) and error.is_final
        _exit_with(str(error), error, FINAL_STATUS if is_final else ERROR_STATUS)


def log_to_stderr() -> None:
    """Log to standard error: in colours at a terminal; elsewhere one line a message, with the full date."""
    logging.basicConfig(level=logging.WARNING, handlers=[_handler()])
    logging.getLogger("umbel").setLevel(logging.INFO)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table that must fit a width."""

    head: str
    worth: int  # columns of greater worth get room first
    cells: Sequence[str | Text]
    least: int | None = None  # the width that it may be cut to; None: never cut
    group: str = ""  # written once, above neighbouring columns of the same group

    @property
    def texts(self) -> list[Text]:
        return [cell.copy() if isinstance(cell, Text) else Text(cell) for cell in self.cells]

    @property
    def wanted(self) -> int:
        """The width when nothing is cut."""
        return max(len(self.head), *(cell.cell_len for cell in self.texts), 0)

    @property
    def needed(self) -> int:
        return self.wanted if self.least is None else min(self.least, self.wanted)


def table_lines(columns: Sequence[Column], width: int) -> list[Text]:
    """Lay out a table: a line for the groups if there are any, one for the heads, then one for each row."""
    widths = _widths(columns, width)
    shown = [(columns[place], widths[place]) for place in sorted(widths)]
    heads = [Text(column.head, "bold") for column, _ in shown]
    rows = zip(*(column.texts for column, _ in shown), strict=True)
    return [*_group_line(shown), *(_line(cells, [width for _, width in shown]) for cells in (heads, *rows))]


def left_out_words(columns: Sequence[Column], width: int) -> Text | None:
    """Name the columns that `table_lines` leaves out at this width, and say how to see them; None if it shows all."""
    shown = _widths(columns, width)
    names = [f"{one.group} {one.head}".strip() for place, one in enumerate(columns) if place not in shown]
    return Text(f"no room for: {some(names, _LEFT_OUT_NAMED)} (--all and --json show them)", "dim") if names else None


def figure(value: float) -> str:
    """A number in four digits, with trailing zeros, so that a column can be compared."""
    return f"{value:#.4g}".rstrip(".")


def figures(means: Mapping[str, float]) -> str:
    return "  ".join(f"{printable(name)} {figure(value)}" for name, value in sorted(means.items()))


def moment(unix_s: float) -> str:
    """Date and time, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%MZ")


def time_of_day(unix_s: float) -> str:
    """The time alone, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%MZ")


def _widths(columns: Sequence[Column], width: int) -> dict[int, int]:
    """Choose the columns that fit, by index; room that is left goes to those that were cut."""
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
    for group, places in groupby(sorted(widths), lambda place: columns[place].group):
        *rest, last = places
        more = min(left, max(0, len(group) - sum(widths[place] + _GAP for place in rest) - widths[last]))
        widths[last] += more
        left -= more
    return widths


def _group_line(shown: Sequence[tuple[Column, int]]) -> list[Text]:
    """The line above the heads; none if no column is of a group."""
    groups = [(name, [width for _, width in found]) for name, found in groupby(shown, lambda one: one[0].group)]
    if not any(name for name, _ in groups):
        return []
    return [
        _line([Text(name, "bold") for name, _ in groups], [sum(each) + _GAP * (len(each) - 1) for _, each in groups])
    ]


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text()
    for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        cell.truncate(width, overflow="ellipsis", pad=place < len(widths) - 1)
        line.append_text(cell)
        if place < len(widths) - 1:
            line.append(" " * _GAP)
    return line


def _handler() -> logging.Handler:
    if sys.stderr.isatty():
        rich = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
        rich.setFormatter(logging.Formatter("%(message)s"))
        return rich
    plain = logging.StreamHandler()
    plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z"))
    return plain


def _exit_with(sentence: str, error: Exception, status: int = ERROR_STATUS) -> NoReturn:
    typer.echo(f"umbel: {printable(sentence)}", err=True)
    raise typer.Exit(status) from error
