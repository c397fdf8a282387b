"""The verbs of the people at a site whose agent runs: `umbel site runs`, `allow` and `deny`. They need no network."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from umbel.aggregation.messages import OpenRun
from umbel.aggregation.phrases import counted
from umbel.client.agent.board import BoardFile, RunsBoard, SiteRun, boards_in
from umbel.client.agent.decisions import DecisionStore, SiteDecision
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.agent.verdict import Stand
from umbel.client.cli.options import SERVER_METAVAR, AllColumns, AsJson, State
from umbel.client.cli.output import Column, one_sentence_errors, print_columns, print_json
from umbel.client.errors import StateError, printable
from umbel.client.state.state_dir import STATE_DEFAULT

site_app = typer.Typer(no_args_is_help=True)
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, as umbel site runs shows it.")]
Hash = Annotated[
    str | None,
    typer.Argument(
        metavar="HASH",
        show_default=False,
        help="The run's hash, as umbel site runs shows it. Without it, you see the run's terms and are asked.",
    ),
]
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
    """What one agent shows. `is_alive`: the agent runs now; `hashes`: of the runs, by name, for `umbel site allow`."""

    board: RunsBoard
    is_alive: bool
    hashes: dict[str, str]


@site_app.command("runs")
def show_runs(state: State = STATE_DEFAULT, shows_all: AllColumns = False, as_json: AsJson = False) -> None:
    """Show the runs that are open to this site, what the coordinator would see, and what the agent does about them."""
    with one_sentence_errors():
        found = [_shown(home) for home in _homes(state.expanduser())]
    if as_json:
        print_json(found)
        return
    for one in found:
        _print(one, shows_all)


@site_app.command("allow")
def allow(run: Run, hash_: Hash = None, state: State = STATE_DEFAULT, server: OfServer = None) -> None:
    """Let the agent take part in a run. It begins within seconds. For a failed run: let the agent try again at once.

    The decision is about the run that you have seen: the one with this hash, or the one that the question shows.
    """
    with one_sentence_errors():
        home, one = _find(run, state.expanduser(), server)
        if one.stand == Stand.REFUSED:
            raise ValueError(f"no person can allow run {run!r}: {one.reason}")
        _require_seen(DecisionStore(home), one.run, hash_, SiteCommands.of(state))
        _decide(home, one.run, is_allowed=True)
    typer.echo(f"allowed {run}: {_what(one.run)}; the coordinator sees {seen_of(one.run)}")
    if one.stand == Stand.NO_APP:
        typer.echo(f"but this agent has no code for it: {one.reason}")
    if not BoardFile(home).is_alive():
        typer.echo("the agent does not run now; it follows this decision when it starts (umbel agent)")


@site_app.command("deny")
def deny(run: Run, state: State = STATE_DEFAULT, server: OfServer = None) -> None:
    """Keep the agent out of a run. If it takes part now, it discards its work, declines the round and leaves the run.

    umbel site allow takes this back.
    """
    with one_sentence_errors():
        home, one = _find(run, state.expanduser(), server)
        _decide(home, one.run, is_allowed=False)
    typer.echo(f"denied {run}: this site takes no part in it")


def seen_of(run: OpenRun) -> str:
    """What the coordinator sees of a site that takes part in the run."""
    if not run.is_secure:
        return "this site's update"
    return f"sums of {run.minimum} or more sites" + (", with noise" if run.is_private else "")


def _decide(home: Path, run: OpenRun, *, is_allowed: bool) -> None:
    DecisionStore(home).decide(run.name, SiteDecision.about(run, is_allowed, time.time()))


def _require_seen(store: DecisionStore, run: OpenRun, hash_: str | None, commands: SiteCommands) -> None:
    """Raise `ValueError` or `typer.Abort` unless the person means exactly this run, and not only its name.

    The agent may write other terms under the name at any time, as its coordinator lists them.
    """
    if hash_ is not None:
        if hash_.strip().lower() != store.hash_of(run):
            raise ValueError(
                f"run {run.name!r} does not have the hash {hash_!r} now: the hash is mistyped, or the coordinator has "
                f"changed the run since you saw it. Look again ({commands.text('runs')}), and allow the run with its "
                "new hash only if you agree to its terms"
            )
        return
    if _is_allowed(store, run):
        return  # the person has decided about exactly this run before
    if not has_terminal():
        raise ValueError(
            f"name the hash of the run that you have seen: {commands.text('runs')} shows it, and "
            f"{commands.text('allow', run.name, 'HASH')} allows exactly this run. Without a hash the command "
            "asks you, and here is no terminal to ask at"
        )
    typer.echo("\n".join((f"run {run.name}", *_terms(run))), err=True)
    typer.confirm("Let this site take part in exactly this run?", abort=True, err=True)


def _is_allowed(store: DecisionStore, run: OpenRun) -> bool:
    try:
        decision = store.of(run.name)
    except StateError:  # a damaged file, which the new decision replaces
        return False
    return decision is not None and decision.is_allowed and decision.identity == run.identity


def has_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def _terms(run: OpenRun) -> tuple[str, ...]:
    """What a decision covers, a line for each part."""
    return (
        f"  the coordinator sees    {seen_of(run)}",
        f"  run file, SHA-256       {run.run_file_sha256}",
        f"  first model, SHA-256    {run.model_sha256}",
        f"  member list, SHA-256    {run.members_sha256 or 'none'}",
    )


def _find(name: str, state_dir: Path, server: str | None) -> tuple[Path, SiteRun]:
    """The run, and the directory of its coordinator. Raises `StateError`, `ValueError`."""
    found = [
        (home, run)
        for home in _homes(state_dir)
        for board in [_board(home)]
        for run in board.runs
        if run.run.name == name and (server is None or board.server in server.split(","))
    ]
    if not found:
        look = SiteCommands.of(state_dir).text("runs")
        raise ValueError(f"the agent knows no open run named {name!r}; {look} shows the open runs")
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


def _board(home: Path) -> RunsBoard:
    board = BoardFile(home).read()
    if board is None:
        raise StateError(f"{home} has no runs to show any more; look again")
    return board


def _shown(home: Path) -> Shown:
    board = _board(home)
    store = DecisionStore(home)
    return Shown(board, BoardFile(home).is_alive(), {one.run.name: store.hash_of(one.run) for one in board.runs})


def _print(shown: Shown, shows_all: bool) -> None:
    board = shown.board
    alive = "the agent runs" if shown.is_alive else "the agent does not run; this is what it saw last"
    typer.echo(f"{board.client} at {board.server}: {alive}; at most {counted(board.at_once, 'run')} train at once")
    if board.trouble:
        typer.echo(board.trouble)
    if not board.runs:
        typer.echo("no run is open to this site")
        return
    print_columns(_columns(board.runs, shown.hashes), shows_all)
    for one in board.runs:
        if one.reason:
            typer.echo(f"{printable(one.run.name)}: {printable(one.reason)}")  # unwrapped, so a command can be copied


def _columns(runs: Sequence[SiteRun], hashes: Mapping[str, str]) -> list[Column]:
    """What to do is no column: it is a sentence, and may have commands to copy."""
    return [
        Column("run", 6, [printable(one.run.name) for one in runs]),
        Column("hash", 5, [hashes[one.run.name] for one in runs]),
        Column("state", 4, [printable(_state(one)) for one in runs], least=12),
        Column("model", 1, [_what(one.run) for one in runs]),
        Column("coordinator sees", 3, [seen_of(one.run) for one in runs]),
        Column("code", 2, [printable(one.app) for one in runs], least=10),
    ]


def _state(one: SiteRun) -> str:
    number = f", round {one.round} of {one.run.rounds}" if one.round else ""
    return f"{one.state}{number}"


def _what(run: OpenRun) -> str:
    return f"{counted(run.n_values, 'value')} ({run.model_sha256[:8]})"
