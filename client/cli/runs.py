"""`umbel run`: list, show, watch, pause, resume, stop and roll back a run. Other files add the group's other verbs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.phrases import part_of
from umbel.aggregation.run.records import RoundRecord, RunProgress, RunView
from umbel.client.cli.audit import audit_run, replay_run, verify_file
from umbel.client.cli.models import export_model, list_versions
from umbel.client.cli.new_run import create_run
from umbel.client.cli.options import (
    VERSION_METAVAR,
    AllColumns,
    AsJson,
    RunName,
    Yes,
    operator_verb,
    version_or_best,
)
from umbel.client.cli.output import (
    json_text,
    one_sentence_errors,
    print_json,
    print_run,
    print_table,
    screen,
    table_width,
)
from umbel.client.cli.trace import export_trace
from umbel.client.cli.view import RunPicture
from umbel.client.cli.view_rounds import Events
from umbel.client.operator.operator import Operator

WATCH_WAIT_S = 10.0
LIVE_WAIT_S = 1.0
RESTART_PATIENCE_S = 300.0
ENDED_KEPT = 100
Reason = Annotated[str, typer.Option("--reason", help="The reason; clients see it.")]


def list_runs(operator: Operator, as_json: AsJson = False) -> None:
    """List all runs of a coordinator."""
    runs = operator.runs()
    if as_json:
        print_json(runs)
    else:
        print_table(("run", "status", "rounds", "model", ""), map(_cells, runs))


def show_run(operator: Operator, run: RunName, shows_all: AllColumns = False, as_json: AsJson = False) -> None:
    """Show one run: its rounds so far and the one under way."""
    progress = _whole_progress(operator, run)
    if as_json:
        print_json(progress)
    else:
        width = table_width(shows_all)
        picture = RunPicture(progress.run, progress.ended, progress.live, progress.turned_away, table_width=width)
        screen(shows_all).print(picture)


def watch_run(operator: Operator, run: RunName, as_json: AsJson = False) -> None:
    """Follow a run until it ends. The exit status is 1 if the run was stopped or has failed, for example in its canary.
    If the output is a file or a pipe, each event is a line with its date. With --json each ended round is a line."""
    terminal = screen()
    if as_json:
        status = _follow(operator, run, lambda progress: map(json_text, progress.ended))
    elif terminal.is_terminal:
        status = _follow_live(operator, run, terminal)
    else:
        status = _follow(operator, run, Events().new_in)
    if status in (RunStatus.FAILED, RunStatus.STOPPED):
        raise typer.Exit(1)


def stop_run(
    operator: Operator,
    run: RunName,
    reason: Reason = "stopped by the operator",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End a run now, for good. Its newest model is kept."""
    view = operator.run(run)
    if not (view.status.is_over or yes):
        done = f"{part_of(view.rounds_done, view.rounds_planned, 'round', 'is', 'are')} done"
        typer.confirm(
            f"{run}: {done}. Stop the run for good? (A pause can be undone: umbel run pause)", abort=True, err=True
        )
    if view.status.is_over and not as_json:
        typer.echo(f"{run} is over already; nothing was stopped", err=True)
    print_run(view if view.status.is_over else operator.stop_run(run, reason), as_json)


def pause_run(
    operator: Operator,
    run: RunName,
    reason: Reason = "paused by the operator",
    now: Annotated[bool, typer.Option("--now", help="Abandon the open round instead of letting it finish.")] = False,
    as_json: AsJson = False,
) -> None:
    """Begin no further round until the run is resumed. Its clients wait, and the run stays paused when the
    coordinator restarts."""
    if operator.run(run).status is RunStatus.PAUSED and not now and not as_json:
        typer.echo(f"{run} is paused already", err=True)
    print_run(operator.pause_run(run, reason, now), as_json)


def resume_run(operator: Operator, run: RunName, as_json: AsJson = False) -> None:
    """Continue a paused run."""
    if operator.run(run).status is RunStatus.RUNNING and not as_json:
        typer.echo(f"{run} is not paused", err=True)
    print_run(operator.resume_run(run), as_json)


def start_round(operator: Operator, run: RunName, as_json: AsJson = False) -> None:
    """Start the round now with the clients that wait, if they are at least rounds.minimum."""
    print_run(operator.start_round(run), as_json)


def roll_back(
    operator: Operator,
    run: RunName,
    to: Annotated[str, typer.Option("--to", metavar=VERSION_METAVAR, help="The version to continue from.")],
    reason: Annotated[
        str, typer.Option("--reason", help="The reason for the rollback.")
    ] = "rolled back by the operator",
    as_json: AsJson = False,
) -> None:
    """Continue from an older model version: a copy of it becomes the newest, and the open round is abandoned."""
    before, after = operator.run(run), operator.roll_back(run, version_or_best("--to", to), reason)
    if after.model.version == before.model.version and not as_json:
        typer.echo(f"{run} has this model already; nothing was changed", err=True)
    print_run(after, as_json)


def _cells(view: RunView) -> tuple[str, ...]:
    rounds = f"{view.rounds_done} of {view.rounds_planned}"
    return view.name, view.status.value, rounds, view.model.sha256[:12], view.reason


def _whole_progress(operator: Operator, run: str) -> RunProgress:
    """Every round so far, with the run as the last page shows it."""
    pages = [*operator.ended(run)]
    return replace(pages[-1], ended=tuple(record for page in pages for record in page.ended))


def _follow_live(operator: Operator, run: str, terminal: Console) -> RunStatus:
    ended, status = list[RoundRecord](), RunStatus.RUNNING
    with Live(console=terminal, refresh_per_second=4) as live:
        for progress in operator.follow(run, LIVE_WAIT_S, RESTART_PATIENCE_S):
            ended = [*ended, *progress.ended][-ENDED_KEPT:]
            live.update(RunPicture(progress.run, ended, progress.live, progress.turned_away, fits_screen=True))
            status = progress.run.status
    return status


def _follow(operator: Operator, run: str, lines_of: Callable[[RunProgress], Iterable[str]]) -> RunStatus:
    status = RunStatus.RUNNING
    for progress in operator.follow(run, WATCH_WAIT_S, RESTART_PATIENCE_S):
        for line in lines_of(progress):
            typer.echo(line)
        status = progress.run.status
    return status


run_app = typer.Typer(no_args_is_help=True)
run_app.command("audit")(operator_verb(audit_run))
run_app.command("verify")(one_sentence_errors()(verify_file))
run_app.command("replay")(operator_verb(replay_run))
run_app.command("create")(operator_verb(create_run))
run_app.command("list")(operator_verb(list_runs))
run_app.command("show")(operator_verb(show_run))
run_app.command("watch")(operator_verb(watch_run))
run_app.command("stop")(operator_verb(stop_run))
run_app.command("pause")(operator_verb(pause_run))
run_app.command("resume")(operator_verb(resume_run))
run_app.command("start")(operator_verb(start_round))
run_app.command("rollback")(operator_verb(roll_back))
run_app.command("versions")(operator_verb(list_versions))
run_app.command("export")(operator_verb(export_model))
run_app.command("export-trace")(operator_verb(export_trace))
