"""The command line, `umbel`: the verbs of each part. If a library is missing, it names the extra to install."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import umbel


class RootGroup(TyperGroup):
    """The top level. For a verb that belongs to a group, the error names the group."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Any: typer's click is private
        if self.get_command(ctx, args[0]) is None and (groups := self._groups_with(ctx, args[0])):
            ctx.fail(f"No such command {args[0]!r}. Try: {' or '.join(f'umbel {name} {args[0]}' for name in groups)}")
        return super().resolve_command(ctx, args)

    def _groups_with(self, ctx: Any, verb: str) -> list[str]:
        groups = [(name, group) for name, group in self.commands.items() if isinstance(group, TyperGroup)]
        return [name for name, group in groups if group.get_command(ctx, verb) is not None]


def lazy_group(module: str, name: str, help_text: str) -> typer.Typer:
    """The group `name` of a module of the client's command line. The module is imported when a verb, or their list, is
    needed: `umbel --help` does not wait.
    """

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            self._load()
            return super().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            self._load()
            return super().get_command(ctx, cmd_name)

        def _load(self) -> None:
            if not self.commands:
                group: typer.Typer = getattr(import_module(f"umbel.client.cli.{module}"), name)
                self.commands.update(typer.main.get_group(group).commands)

    return typer.Typer(cls=LazyGroup, help=help_text, no_args_is_help=True)


app = typer.Typer(
    name="umbel",
    cls=RootGroup,
    help="Federated learning: many clients train one model together, and their data never leaves them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXTRA_OF = {"umbel.server": "server", "umbel.sim": "sim"}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"umbel {umbel.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


@cache
def mount() -> None:
    """Add each part's verbs, once."""
    from umbel.client.cli.agent import agent
    from umbel.client.cli.check import doctor
    from umbel.client.cli.site import join, show_fingerprint
    from umbel.client.cli.train import train
    from umbel.server.serve import commands as server
    from umbel.sim import commands as sim

    app.command("demo")(sim.demo)
    app.command("simulate")(sim.simulate)
    app.command("train")(train)
    app.command("serve")(server.serve)
    app.command("join")(join)
    app.command("agent")(agent)
    app.add_typer(
        lazy_group("site_runs", "site_app", "Show, allow and deny the runs of this site's agent."), name="site"
    )
    runs = (
        "Training runs: create, list, show, watch; pause, resume, stop, rollback; versions, export, export-trace; "
        "audit, verify, replay."
    )
    app.add_typer(lazy_group("runs", "run_app", runs), name="run")
    app.add_typer(
        lazy_group("clients", "client_app", "Your own client: check. Enrolled clients: list, remove."), name="client"
    )
    app.add_typer(lazy_group("clients", "token_app", "One-time enrolment tokens."), name="token")
    app.add_typer(lazy_group("models", "model_app", "Model files."), name="model")
    members = "The member list of a consortium: the keys that a site trusts. Made, signed and checked offline."
    app.add_typer(lazy_group("members", "members_app", members), name="members")
    app.command("fingerprint")(show_fingerprint)
    app.command("doctor")(doctor)
    app.add_typer(sim.bench_app, name="bench")


def main() -> None:
    """Run the `umbel` command."""
    mount()
    run_or_explain(app)


def run_or_explain(command: Callable[[], object]) -> None:
    """Run `command`. If an optional library is missing, exit with a sentence that says which extra to install."""
    try:
        command()
    except ModuleNotFoundError as error:
        extra = _extra_that_brings(error)
        if extra is None:
            raise
        how = f"in a clone of umbel: pip install -c constraints.txt '.[{extra}]'"
        typer.echo(f"umbel: this command needs {error.name!r}, which is not installed; {how}", err=True)
        sys.exit(2)


def _extra_that_brings(error: ModuleNotFoundError) -> str | None:
    """The extra of the part that imported the missing library; None without one, or if umbel lacks a module."""
    trace, extra = error.__traceback__, None
    while trace is not None:
        part = ".".join(str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[:2])
        extra = EXTRA_OF.get(part, extra)
        trace = trace.tb_next
    if extra is not None and (error.name or "").startswith("umbel"):
        return None
    return extra


if __name__ == "__main__":
    main()
