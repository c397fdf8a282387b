"""The command line's verbs for a site (`join`) and for an operator (`run`, `token`, `model`), as Typer functions."""

import logging
import os
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table

from umbel.aggregation.artifact import decode_model, encode_model
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.records import RoundRecord, RunView
from umbel.aggregation.runfile import RunFile
from umbel.client.admin import Operator
from umbel.client.errors import ClientError
from umbel.client.loading import load_app
from umbel.client.loop import run_client
from umbel.client.view import render_run

WATCH_WAIT_S = 10.0
ENDED_KEPT = 100

Server = Annotated[str, typer.Option("--server", envvar="UMBEL_SERVER", help="The coordinator, https://host[:port].")]
App = Annotated[str, typer.Option("--app", help="Your code as module:attribute, such as my_hospital:client.")]
KeyFile = Annotated[
    Path | None,
    typer.Option("--admin-key-file", help="File that holds the admin key; else the variable UMBEL_ADMIN_KEY is read."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
RunName = Annotated[str, typer.Argument(help="The run's name.")]

run_app = typer.Typer(help="Training runs: create, list, show, watch, stop, download.", no_args_is_help=True)
token_app = typer.Typer(help="One-time enrolment tokens.", no_args_is_help=True)
model_app = typer.Typer(help="Model files.", no_args_is_help=True)


def join(
    server: Server,
    app: App,
    run: Annotated[str, typer.Option("--run", help="The run to take part in.")],
    token: Annotated[
        str | None, typer.Option("--token", envvar="UMBEL_TOKEN", help="One-time token; only for the first start.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="How this client is known; by default made from the host's name.")
    ] = None,
    state: Annotated[
        Path, typer.Option("--state", help="Directory for key and unsent work; one for each client.")
    ] = Path("~/.umbel"),
    as_json: AsJson = False,
) -> None:
    """Take part in a run: enrol (once), check in, train, report, until the run ends or Ctrl-C."""
    _log_to_stderr()
    with one_sentence_errors():
        end = run_client(load_app(app), server, state.expanduser(), run, token=token, name=name)
        if as_json:
            _print_json(end)
        else:
            typer.echo(f"{end.run} {end.status}: {end.reason} ({end.accepted} of {end.reports} reports counted)")
        if end.status == RunStatus.FAILED:
            raise typer.Exit(1)


@run_app.command("create")
def create_run(
    file: Annotated[Path, typer.Argument(help="The run file, in TOML.")],
    model: Annotated[Path, typer.Option("--model", help="The first model, in safetensors.")],
    server: Server,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Create a run from a run file and its first model. The same again changes nothing."""
    with _operator(server, admin_key_file) as operator:
        text, weights = file.read_text(), model.read_bytes()
        run_file = TypeAdapter(RunFile).validate_python(tomllib.loads(text))
        decode_model(weights)
        view = operator.create_run(run_file.name, text, operator.upload_model(weights))
        _print_json(view) if as_json else typer.echo(_sentence(view))


@run_app.command("list")
def list_runs(server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """All runs of a coordinator."""
    with _operator(server, admin_key_file) as operator:
        runs = operator.runs()
    if as_json:
        _print_json(runs)
        return
    table = Table("run", "status", "rounds", "model", "", box=None)
    for view in runs:
        rounds = f"{view.rounds_done} of {view.rounds_planned}"
        table.add_row(view.name, view.status.value, rounds, view.model.sha256[:12], view.reason)
    Console().print(table)


@run_app.command("show")
def show_run(run: RunName, server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """One run: its rounds so far and the one under way."""
    with _operator(server, admin_key_file) as operator:
        progress = operator.progress(run)
    if as_json:
        _print_json(progress)
    else:
        Console().print(render_run(progress.run, progress.ended, progress.live))


@run_app.command("watch")
def watch_run(run: RunName, server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Follow a run until it ends. With --json: one line for each round that ends."""
    with _operator(server, admin_key_file) as operator:
        view = _follow_json(operator, run) if as_json else _follow_live(operator, run)
    if view.status is RunStatus.FAILED:
        raise typer.Exit(1)


@run_app.command("stop")
def stop_run(
    run: RunName,
    server: Server,
    reason: Annotated[str, typer.Option("--reason", help="Why; clients are told.")] = "stopped by the operator",
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """End a run now; its newest model stays."""
    with _operator(server, admin_key_file) as operator:
        view = operator.stop_run(run, reason)
    _print_json(view) if as_json else typer.echo(_sentence(view))


@run_app.command("download")
def download_model(
    run: RunName,
    out: Annotated[Path, typer.Option("--out", help="Where to write the newest model, in safetensors.")],
    server: Server,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Download a run's newest model, checked against its digest."""
    with _operator(server, admin_key_file) as operator:
        newest = operator.run(run).model
        operator.download_model(newest.sha256, out)
    _print_json(newest) if as_json else typer.echo(f"{out}: version {newest.version}, sha256 {newest.sha256}")


@token_app.command("create")
def create_tokens(
    server: Server,
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="How many clients to let in.")] = 1,
    ttl_hours: Annotated[float, typer.Option("--ttl-hours", min=0.01, help="How long they stay valid.")] = 168.0,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Make one-time enrolment tokens, one a line; give each to one client."""
    with _operator(server, admin_key_file) as operator:
        tokens = operator.create_tokens(count, ttl_hours * 3600)
    _print_json({"tokens": tokens}) if as_json else typer.echo("\n".join(tokens))


@model_app.command("init")
def init_model(
    app: App,
    out: Annotated[Path, typer.Option("--out", help="Where to write the model, in safetensors.")],
    as_json: AsJson = False,
) -> None:
    """Write the model of an app, as its code initialises it: the first model of a run."""
    with one_sentence_errors():
        weights = encode_model(load_app(app).model.state_dict())
        layout, _ = decode_model(weights)
        out.write_bytes(weights)
    facts = {"file": str(out), "size_bytes": len(weights), "n_values": layout.n_values, "layout_digest": layout.digest}
    _print_json(facts) if as_json else typer.echo(f"{out}: {layout.n_values} values, {len(weights)} bytes")


@contextmanager
def one_sentence_errors() -> Generator[None]:
    """Errors that a person can act on become one sentence and exit status 1; bugs keep their traceback."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        _exit_with(f"{'.'.join(map(str, first['loc'])) or 'run file'}: {first['msg']}", error)
    except (ClientError, ValueError, OSError) as error:
        _exit_with(str(error), error)


def _exit_with(sentence: str, error: Exception) -> NoReturn:
    typer.echo(f"umbel: {sentence}", err=True)
    raise typer.Exit(1) from error


@contextmanager
def _operator(server: str, admin_key_file: Path | None) -> Generator[Operator]:
    with one_sentence_errors(), Operator(server, _admin_key(admin_key_file)) as operator:
        yield operator


def _admin_key(path: Path | None) -> str:
    key = (path.read_text() if path is not None else os.environ.get("UMBEL_ADMIN_KEY", "")).strip()
    if not key.isascii() or not key.isprintable() or not key:
        raise ValueError("no admin key: pass --admin-key-file, or set UMBEL_ADMIN_KEY to what the coordinator made")
    return key


def _follow_live(operator: Operator, run: str) -> RunView:
    ended: list[RoundRecord] = []
    with Live(console=Console(), refresh_per_second=4) as live:
        after, wait_s = 0, 0.0
        while True:
            progress = operator.progress(run, after, wait_s)
            ended = [*ended, *progress.ended][-ENDED_KEPT:]
            after, wait_s = progress.next_after, 1.0
            live.update(render_run(progress.run, ended, progress.live))
            if progress.run.status is not RunStatus.RUNNING:
                return progress.run


def _follow_json(operator: Operator, run: str) -> RunView:
    after, wait_s = 0, 0.0
    while True:
        progress = operator.progress(run, after, wait_s)
        for record in progress.ended:
            _print_json(record)
        after, wait_s = progress.next_after, WATCH_WAIT_S
        if progress.run.status is not RunStatus.RUNNING:
            return progress.run


def _sentence(view: RunView) -> str:
    return (
        f"{view.name}: {view.status.value}, {view.rounds_done} of {view.rounds_planned} rounds. {view.reason}".strip()
    )


def _print_json(value: object) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(type(value))
    typer.echo(adapter.dump_json(value).decode())


def _log_to_stderr() -> None:
    handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("umbel").setLevel(logging.INFO)
