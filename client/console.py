"""What the command line's verbs do and print; `commands.py` has their flags."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.records import RoundRecord, RunProgress
from umbel.client.admin import Operator
from umbel.client.errors import ClientError
from umbel.client.events import Events
from umbel.client.loading import load_app, load_initial_model
from umbel.client.loop import run_client
from umbel.client.model_files import layout_in, write_model
from umbel.client.output import log_to_stderr, print_json, screen, tell_run
from umbel.client.policy_file import read_policy
from umbel.client.printable import printable
from umbel.client.run_files import read_run_file
from umbel.client.view import RunPicture

WATCH_WAIT_S = 10.0
LIVE_WAIT_S = 1.0
RESTART_PATIENCE_S = 300.0
ENDED_KEPT = 100


def join(
    server: str,
    app: str,
    run: str,
    token: str | None,
    name: str | None,
    labels: Sequence[str],
    state: Path,
    policy: Path | None,
    as_json: bool,
) -> None:
    log_to_stderr()
    with one_sentence_errors():
        facts, limits = dict(map(_label, labels)), None if policy is None else read_policy(policy.expanduser())
        end = run_client(
            load_app(app), server, state.expanduser(), run, token=token, name=name, labels=facts, policy=limits
        )
    if as_json:
        print_json(end)
    else:
        typer.echo(f"{end.run} {end.status}: {end.reason} ({end.accepted} of {end.reports} reports counted)")
    if end.status == RunStatus.FAILED:
        raise typer.Exit(1)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--label must look like name=value, such as tier=hospital, not {text!r}")
    return name, value


def create_run(operator: Operator, file: Path, model: Path, as_json: bool) -> None:
    """Both files are checked here first, so that mistakes are named before anything is sent."""
    text, run_file = read_run_file(file)
    layout_in(model)
    tell_run(operator.create_run(run_file.name, text, operator.upload_model(model)), as_json)


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
    tokens = operator.create_tokens(count, ttl_hours * 3600, client=name, labels=dict(map(_label, labels)))
    if as_json:
        print_json({"tokens": tokens})
    else:
        typer.echo("\n".join(map(printable, tokens)))


def init_model(app: str, out: Path, seed: int, as_json: bool) -> None:
    with one_sentence_errors():
        layout = write_model(out, load_initial_model(app, seed).state_dict())
    size_bytes = out.stat().st_size
    facts = {"file": str(out), "size_bytes": size_bytes, "n_values": layout.n_values, "layout_digest": layout.digest}
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"{out}: {layout.n_values} values, {size_bytes} bytes")


@contextmanager
def operator_at(server: str, admin_key_file: Path | None) -> Generator[Operator]:
    """An operator's connection whose errors become one sentence."""
    with one_sentence_errors(), Operator(server, _admin_key(admin_key_file)) as operator:
        yield operator


@contextmanager
def one_sentence_errors() -> Generator[None]:
    """Errors that a person can act on become one sentence and exit status 1; bugs keep their traceback."""
    try:
        yield
    except OSError as error:
        _exit_with(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error), error)
    except (ClientError, ValueError) as error:
        _exit_with(str(error), error)


def _exit_with(sentence: str, error: Exception) -> NoReturn:
    typer.echo(f"umbel: {printable(sentence)}", err=True)
    raise typer.Exit(1) from error


def _admin_key(path: Path | None) -> str:
    if path is not None and not path.is_file():
        raise ValueError(f"there is no admin key file {path}: the coordinator made one in its data directory")
    key = (path.read_text() if path is not None else os.environ.get("UMBEL_ADMIN_KEY", "")).strip()
    if not key.isascii() or not key.isprintable() or not key:
        raise ValueError("no admin key: pass --admin-key-file, or set UMBEL_ADMIN_KEY to what the coordinator made")
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
