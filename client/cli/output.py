"""Where the command line's words go: to a person at a terminal, or to a file or a pipe, where nothing is wrapped."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.logging import RichHandler

from umbel.aggregation.phrases import counted
from umbel.aggregation.run.records import RunView
from umbel.client.errors import ClientError
from umbel.client.printable import printable

_UNWRAPPED_COLUMNS = 1 << 16


def screen() -> Console:
    """Standard output: as wide as the terminal, or, where it is none, as wide as what is written."""
    console = Console()
    return console if console.is_terminal else Console(width=_UNWRAPPED_COLUMNS)


def print_json(value: object) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(type(value))
    typer.echo(adapter.dump_json(value).decode())


def tell_run(view: RunView, as_json: bool) -> None:
    """How a run stands, after something was done to it."""
    if as_json:
        print_json(view)
    else:
        rounds = f"{view.rounds_done} of {counted(view.rounds_planned, 'round')}"
        typer.echo(f"{printable(view.name)}: {view.status.value}, {rounds}. {printable(view.reason)}".strip())


@contextmanager
def one_sentence_errors() -> Generator[None]:
    """Errors that a person can act on become one sentence and exit status 1; bugs keep their traceback."""
    try:
        yield
    except OSError as error:
        _exit_with(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error), error)
    except (ClientError, ValueError) as error:
        _exit_with(str(error), error)


def log_to_stderr() -> None:
    """This process's log on standard error: coloured at a terminal; elsewhere a line a message, with the full date."""
    logging.basicConfig(level=logging.WARNING, handlers=[_handler()])
    logging.getLogger("umbel").setLevel(logging.INFO)


def _handler() -> logging.Handler:
    if sys.stderr.isatty():
        rich = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
        rich.setFormatter(logging.Formatter("%(message)s"))
        return rich
    plain = logging.StreamHandler()
    plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z"))
    return plain


def _exit_with(sentence: str, error: Exception) -> NoReturn:
    typer.echo(f"umbel: {printable(sentence)}", err=True)
    raise typer.Exit(1) from error
