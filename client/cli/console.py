"""What an operator's verbs do and print; `commands.py` has their flags, `model_console.py` those that need torch."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.run.records import RoundRecord, RunProgress
from umbel.client.cli.events import Events
from umbel.client.cli.output import one_sentence_errors, print_json, screen
from umbel.client.cli.view import RunPicture
from umbel.client.operator.operator import Operator
from umbel.client.printable import printable

WATCH_WAIT_S = 10.0
LIVE_WAIT_S = 1.0
RESTART_PATIENCE_S = 300.0
ENDED_KEPT = 100


def list_runs(operator: Operator, as_json: bool) -> None:
    runs = operator.runs()
    if as_json:
        print_json(runs)
        return
    table = Table("run", "status", "rounds", "model", "", box=None)
    for view in runs:
        rounds = f"{view.rounds_done} of {view.rounds_planned}"
        cells = (view.name, view.status.value, rounds, view.model.sha256[:12], view.reason)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    screen().print(table)


def show_run(operator: Operator, run: str, as_json: bool) -> None:
    progress = _all_progress(operator, run)
    if as_json:
        print_json(progress)
    else:
        screen().print(RunPicture(progress.run, progress.ended, progress.live, progress.turned_away))


def watch_run(operator: Operator, run: str, as_json: bool) -> None:
    terminal = screen()
    if as_json:
        status = _follow_json(operator, run)
    elif terminal.is_terminal:
        status = _follow_live(operator, run, terminal)
    else:
        status = _follow_events(operator, run)
    if status in (RunStatus.FAILED, RunStatus.STOPPED):
        raise typer.Exit(1)


def create_tokens(
    operator: Operator, count: int, ttl_hours: float, name: str | None, labels: Sequence[str], as_json: bool
) -> None:
    tokens = operator.create_tokens(count, ttl_hours * 3600, client=name, labels=labels_of(labels))
    if as_json:
        print_json({"tokens": tokens})
    else:
        typer.echo("\n".join(map(printable, tokens)))


@contextmanager
def operator_at(server: str, admin_key_file: Path | None) -> Generator[Operator]:
    """An operator's connection whose errors become one sentence."""
    with one_sentence_errors(), Operator(server, _admin_key(admin_key_file)) as operator:
        yield operator


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """What `--label NAME=VALUE` says, once or more. Raises `ValueError`."""
    return dict(map(_label, texts))


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--label must look like name=value, such as tier=hospital, not {text!r}")
    return name, value


def _admin_key(path: Path | None) -> str:
    if path is not None and not path.is_file():
        raise ValueError(
            f"there is no admin key file {path}: the coordinator made one, admin.key in its data directory"
        )
    key = (path.read_text() if path is not None else os.environ.get("UMBEL_ADMIN_KEY", "")).strip()
    if not key.isascii() or not key.isprintable() or not key:
        raise ValueError(
            "no admin key: the coordinator made one in its data directory; say where it is, and try again: "
            "export UMBEL_ADMIN_KEY_FILE=umbel-data/admin.key (or --admin-key-file, or the key in UMBEL_ADMIN_KEY)"
        )
    return key


def _all_progress(operator: Operator, run: str) -> RunProgress:
    """Every round so far; the coordinator tells them in pages."""
    progress, ended = operator.progress(run), list[RoundRecord]()
    while progress.ended:
        ended += progress.ended
        progress = operator.progress(run, progress.next_after)
    return replace(progress, ended=tuple(ended))


def _follow_live(operator: Operator, run: str, terminal: Console) -> RunStatus:
    ended, status = list[RoundRecord](), RunStatus.RUNNING
    with Live(console=terminal, refresh_per_second=4) as live:
        for progress in operator.follow(run, LIVE_WAIT_S, RESTART_PATIENCE_S):
            ended = [*ended, *progress.ended][-ENDED_KEPT:]
            live.update(RunPicture(progress.run, ended, progress.live, progress.turned_away, fits_screen=True))
            status = progress.run.status
    return status


def _follow_events(operator: Operator, run: str) -> RunStatus:
    events, status = Events(), RunStatus.RUNNING
    for progress in operator.follow(run, WATCH_WAIT_S, RESTART_PATIENCE_S):
        for line in events.new_in(progress):
            typer.echo(line)
        status = progress.run.status
    return status


def _follow_json(operator: Operator, run: str) -> RunStatus:
    status = RunStatus.RUNNING
    for progress in operator.follow(run, WATCH_WAIT_S, RESTART_PATIENCE_S):
        for record in progress.ended:
            print_json(record)
        status = progress.run.status
    return status
