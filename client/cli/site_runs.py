"""The verbs of the people at a site whose agent runs: `umbel site runs`, `allow` and `deny`. They need no network."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from umbel.aggregation.messages import OpenRun
from umbel.aggregation.phrases import counted
from umbel.client.agent.board import BoardFile, RunsBoard, SiteRun, boards_in
from umbel.client.agent.decisions import DecisionStore, SiteDecision
from umbel.client.agent.verdict import Stand
from umbel.client.cli.options import SERVER_METAVAR, STATE_DEFAULT, AsJson, State
from umbel.client.cli.output import one_sentence_errors, print_json, print_table
from umbel.client.errors import StateError

site_app = typer.Typer(no_args_is_help=True)
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, as umbel site runs shows it.")]
OfServer = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar=SERVER_METAVAR,
        help="The coordinator, if the agents of several coordinators use this state directory.",
    ),
]


@dataclass(frozen=True, slots=True)
class Shown:
    """What one agent shows. `is_alive`: the agent runs now."""

    board: RunsBoard
    is_alive: bool


@site_app.command("runs")
def show_runs(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Show the runs that are open to this site, what the coordinator would see, and what the agent does about them."""
    with one_sentence_errors():
        found = [_shown(home) for home in _homes(state.expanduser())]
    if as_json:
        print_json(found)
        return
    for one in found:
        _print(one)


@site_app.command("allow")
def allow(run: Run, state: State = STATE_DEFAULT, server: OfServer = None) -> None:
    """Let the agent take part in a run. It begins within seconds. For a failed run: let the agent try again at once."""
    _decide(run, state, server, is_allowed=True)


@site_app.command("deny")
def deny(run: Run, state: State = STATE_DEFAULT, server: OfServer = None) -> None:
    """Keep the agent out of a run. If it takes part now, it sends the work that is done, and leaves the run.

    umbel site allow takes this back.
    """
    _decide(run, state, server, is_allowed=False)


def seen_of(run: OpenRun) -> str:
    """What the coordinator sees of a site that takes part in the run."""
    if not run.is_secure:
        return "this site's update"
    return f"sums of {run.minimum} or more sites" + (", with noise" if run.is_private else "")


def _decide(name: str, state: Path, server: str | None, *, is_allowed: bool) -> None:
    with one_sentence_errors():
        home, one = _find(name, state.expanduser(), server)
        if is_allowed and one.stand == Stand.REFUSED:
            raise ValueError(f"no person can allow run {name!r}: {one.reason}")
        DecisionStore(home).decide(one.run.name, SiteDecision.about(one.run, is_allowed, time.time()))
    if not is_allowed:
        typer.echo(f"denied {name}: this site takes no part in it")
        return
    typer.echo(f"allowed {name}: {_what(one.run)}; the coordinator sees {seen_of(one.run)}")
    if one.stand == Stand.NO_APP:
        typer.echo(f"but this agent has no code for it: {one.reason}")
    if not BoardFile(home).is_alive():
        typer.echo("the agent does not run now; it follows this decision when it starts (umbel agent)")


def _find(name: str, state_dir: Path, server: str | None) -> tuple[Path, SiteRun]:
    """The run, and the directory of its coordinator. Raises `StateError`, `ValueError`."""
    found = [
        (home, run)
        for home in _homes(state_dir)
        for board in [_shown(home).board]
        for run in board.runs
        if run.run.name == name and (server is None or board.server in server.split(","))
    ]
    if not found:
        raise ValueError(f"the agent knows no open run named {name!r}; umbel site runs shows the open runs")
    if len(found) > 1:
        raise ValueError(f"several coordinators have a run named {name!r}; name one with --server")
    return found[0]


def _homes(state_dir: Path) -> list[Path]:
    homes = boards_in(state_dir)
    if not homes:
        raise StateError(
            f"no agent has run with the state directory {state_dir} yet; start one with umbel agent, or name its "
            "directory with --state"
        )
    return homes


def _shown(home: Path) -> Shown:
    file = BoardFile(home)
    board = file.read()
    if board is None:
        raise StateError(f"{home} has no runs to show any more; look again")
    return Shown(board, file.is_alive())


def _print(shown: Shown) -> None:
    board = shown.board
    alive = "the agent runs" if shown.is_alive else "the agent does not run; this is what it saw last"
    typer.echo(f"{board.client} at {board.server}: {alive}; at most {counted(board.at_once, 'run')} train at once")
    if board.trouble:
        typer.echo(board.trouble)
    if not board.runs:
        typer.echo("no run is open to this site")
        return
    heads = ("run", "state", "model", "coordinator sees", "code", "what to do")
    print_table(
        heads,
        ((one.run.name, _state(one), _what(one.run), seen_of(one.run), one.app, one.reason) for one in board.runs),
    )


def _state(one: SiteRun) -> str:
    number = f", round {one.round} of {one.run.rounds}" if one.round else ""
    return f"{one.state}{number}"


def _what(run: OpenRun) -> str:
    return f"{counted(run.n_values, 'value')} ({run.model_sha256[:8]})"
