"""The command line's verbs for a site (`join`) and for an operator (`run`, `client`, `token`, `model`): flags and help.

What they do is in `console.py`, `lifecycle.py`, `roster.py`, and in `model_console.py`, which alone brings torch. They
are imported only when a verb runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from umbel.client.cli.audit_commands import audit_run, replay_run, verify_file
from umbel.client.cli.flags import AsJson, KeyFile, RunName, Server, Yes

App = Annotated[str, typer.Option("--app", help="Your code as module:attribute, such as my_hospital:client.")]

ClientName = Annotated[str, typer.Argument(metavar="NAME", help="The client's name.")]

run_app = typer.Typer(
    help="Training runs: create, list, show, watch; pause, resume, stop, rollback; versions, export, export-trace.",
    no_args_is_help=True,
)
run_app.command("audit")(audit_run)
run_app.command("verify")(verify_file)
run_app.command("replay")(replay_run)
client_app = typer.Typer(help="Enrolled clients: list, remove.", no_args_is_help=True)
token_app = typer.Typer(help="One-time enrolment tokens.", no_args_is_help=True)
model_app = typer.Typer(help="Model files.", no_args_is_help=True)


@token_app.callback()
@model_app.callback()
def _group() -> None:
    """Keeps a group with one verb a group: Typer would otherwise drop the verb's name."""


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
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="NAME=VALUE", help="A fact about this site, for its operator; may be repeated."
        ),
    ] = None,
    state: Annotated[
        Path, typer.Option("--state", help="Directory for key and unsent work; one for each client.")
    ] = Path("~/.umbel"),
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="What this site allows, in TOML, whatever the coordinator asks."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a run: enrol (once), check in, train, report, until the run ends or Ctrl-C."""
    from umbel.client.cli import model_console

    model_console.join(server, app, run, token, name, label or (), state, policy, as_json)


@run_app.command("create")
def create_run(
    file: Annotated[Path, typer.Argument(help="The run file, in TOML.")],
    model: Annotated[Path, typer.Option("--model", help="The first model, in safetensors.")],
    server: Server,
    members: Annotated[
        Path | None,
        typer.Option(
            "--members", metavar="FILE", help="The member list that the run file names: nobody else takes part."
        ),
    ] = None,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Create a run from a run file and its first model. The same command again changes nothing, with one exception: it
    can add --members to a run that was created without it."""
    from umbel.client.cli import console, model_console

    with console.operator_at(server, admin_key_file) as operator:
        model_console.create_run(operator, file, model, members, as_json)


@run_app.command("list")
def list_runs(server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """All runs of a coordinator."""
    from umbel.client.cli import console

    with console.operator_at(server, admin_key_file) as operator:
        console.list_runs(operator, as_json)


@run_app.command("show")
def show_run(run: RunName, server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """One run: its rounds so far and the one under way."""
    from umbel.client.cli import console

    with console.operator_at(server, admin_key_file) as operator:
        console.show_run(operator, run, as_json)


@run_app.command("watch")
def watch_run(run: RunName, server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Follow a run until it ends; exit status 1 if it was stopped or failed, as by its canary. In a file or a pipe: a
    line an event, each with its date. --json: a line for each round's end."""
    from umbel.client.cli import console

    with console.operator_at(server, admin_key_file) as operator:
        console.watch_run(operator, run, as_json)


@run_app.command("stop")
def stop_run(
    run: RunName,
    server: Server,
    reason: Annotated[str, typer.Option("--reason", help="Why; clients are told.")] = "stopped by the operator",
    yes: Yes = False,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """End a run now, for good; its newest model stays."""
    from umbel.client.cli import console, lifecycle

    with console.operator_at(server, admin_key_file) as operator:
        lifecycle.stop_run(operator, run, reason, yes, as_json)


@run_app.command("pause")
def pause_run(
    run: RunName,
    server: Server,
    reason: Annotated[str, typer.Option("--reason", help="Why; clients are told.")] = "paused by the operator",
    now: Annotated[bool, typer.Option("--now", help="Abandon the open round instead of letting it finish.")] = False,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Begin no further round until the run is resumed; its clients stay, and a restart leaves it paused."""
    from umbel.client.cli import console, lifecycle

    with console.operator_at(server, admin_key_file) as operator:
        lifecycle.pause_run(operator, run, reason, now, as_json)


@run_app.command("resume")
def resume_run(run: RunName, server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """Let a paused run go on."""
    from umbel.client.cli import console, lifecycle

    with console.operator_at(server, admin_key_file) as operator:
        lifecycle.resume_run(operator, run, as_json)


@run_app.command("rollback")
def roll_back(
    run: RunName,
    to: Annotated[str, typer.Option("--to", metavar="VERSION|best", help="The version to go on from.")],
    server: Server,
    reason: Annotated[str, typer.Option("--reason", help="Why.")] = "rolled back by the operator",
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Go on from an older model version: a copy of it becomes the newest; the open round is abandoned."""
    from umbel.client.cli import console, lifecycle

    with console.operator_at(server, admin_key_file) as operator:
        lifecycle.roll_back(operator, run, to, reason, as_json)


@run_app.command("versions")
def list_versions(run: RunName, server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """A run's model versions: where each is from, how it did, and which were deleted."""
    from umbel.client.cli import console, lifecycle

    with console.operator_at(server, admin_key_file) as operator:
        lifecycle.list_versions(operator, run, as_json)


@run_app.command("export")
def export_model(
    run: RunName,
    out: Annotated[Path, typer.Option("--out", help="Where to write the model, in safetensors.")],
    server: Server,
    version: Annotated[int | None, typer.Option("--version", min=0, help="Which one; by default the newest.")] = None,
    full_precision: Annotated[
        bool,
        typer.Option("--full-precision", help="The coordinator's own copy, before it was rounded for its clients."),
    ] = False,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a model version to a file, checked against its digest; whole, or not at all."""
    from umbel.client.cli import console, lifecycle

    with console.operator_at(server, admin_key_file) as operator:
        lifecycle.export_model(operator, run, version, out, as_json, full_precision=full_precision)


@run_app.command("export-trace")
def export_trace(
    runs: Annotated[list[str], typer.Argument(metavar="NAME", help="Runs of the same clients, one or more.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write the trace, in JSON.")],
    server: Server,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there already.")] = False,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Write how rounds went, naming nobody, so that `umbel simulate` can have clients like these
    (docs/reference/traces.md). Of runs under way, what has ended is in it."""
    from umbel.client.cli import console, trace_console

    with console.operator_at(server, admin_key_file) as operator:
        trace_console.export_trace(operator, runs, out, force, as_json)


@client_app.command("list")
def list_clients(server: Server, admin_key_file: KeyFile = None, as_json: AsJson = False) -> None:
    """All enrolled clients: what the token said of each, what it says of itself, when it enrolled and was last heard,
    and who was removed."""
    from umbel.client.cli import clients as roster
    from umbel.client.cli import console

    with console.operator_at(server, admin_key_file) as operator:
        roster.list_clients(operator, as_json)


@client_app.command("remove")
def remove_client(
    client: ClientName,
    server: Server,
    yes: Yes = False,
    admin_key_file: KeyFile = None,
) -> None:
    """Refuse a client from now on. This cannot be undone: its name stays taken, so it returns only under a new one."""
    from umbel.client.cli import clients as roster
    from umbel.client.cli import console

    with console.operator_at(server, admin_key_file) as operator:
        roster.remove_client(operator, client, yes)


@token_app.command("create")
def create_tokens(
    server: Server,
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="How many clients to let in.")] = 1,
    ttl_hours: Annotated[float, typer.Option("--ttl-hours", min=0.01, help="How long they stay valid.")] = 168.0,
    name: Annotated[
        str | None, typer.Option("--name", help="Enrols this client and no other; nobody else can take the name.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="NAME=VALUE", help="What you say of the clients, such as tier=ward; may be repeated."
        ),
    ] = None,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Make one-time enrolment tokens, one a line; give each to one client. A run's coverage counts by name only clients
    whose token had a --name, and by tier only those whose token had a --label tier=..."""
    from umbel.client.cli import console

    with console.operator_at(server, admin_key_file) as operator:
        console.create_tokens(operator, count, ttl_hours, name, label or (), as_json)


@model_app.command("init")
def init_model(
    app: App,
    out: Annotated[Path, typer.Option("--out", help="Where to write the model, in safetensors.")],
    seed: Annotated[int, typer.Option(help="Seed of torch's generator: the same seed, the same weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write the model of an app (or a torch.nn.Module), as its code initialises it: the first model of a run."""
    from umbel.client.cli import model_console

    model_console.init_model(app, out, seed, as_json)
