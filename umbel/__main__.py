"""The one command line, `umbel`: it mounts what each part offers and says what to install for what is missing."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import umbel


class Verbs(TyperGroup):
    """The verbs and groups of the command line; of a verb that stands in a group, it says which."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Any: the click that typer brings is its own, private
        if self.get_command(ctx, args[0]) is None and (groups := self._groups_with(args[0])):
            ctx.fail(f"No such command {args[0]!r}. Try: {' or '.join(f'umbel {name} {args[0]}' for name in groups)}")
        return super().resolve_command(ctx, args)

    def _groups_with(self, verb: str) -> list[str]:
        return [
            name for name, group in self.commands.items() if isinstance(group, TyperGroup) and verb in group.commands
        ]


app = typer.Typer(
    name="umbel",
    cls=Verbs,
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
    """Each part's commands, once. They import their heavy libraries when they run, so that `--help` is quick."""
    from umbel.client.cli import commands as client
    from umbel.client.cli import members_commands as members
    from umbel.server import commands as server
    from umbel.sim import commands as sim

    app.command("demo")(sim.demo)
    app.command("simulate")(sim.simulate)
    app.command("serve")(server.serve)
    app.command("join")(client.join)
    app.add_typer(client.run_app, name="run")
    app.add_typer(client.client_app, name="client")
    app.add_typer(client.token_app, name="token")
    app.add_typer(client.model_app, name="model")
    app.add_typer(members.members_app, name="members")
    app.command("fingerprint")(members.show_fingerprint)
    app.add_typer(sim.bench_app, name="bench")


def main() -> None:
    """The `umbel` command. Exits non-zero with one sentence where something is missing."""
    mount()
    run_or_explain(app)


def run_or_explain(command: Callable[[], object]) -> None:
    """Run `command`; turn a missing optional library into the sentence that says which extra to install."""
    try:
        command()
    except ModuleNotFoundError as error:
        extra = _extra_that_brings(error)
        if extra is None:
            raise
        how = f"in a clone of umbel: pip install -c constraints.txt '.[{extra}]'"
        typer.echo(f"umbel: this command needs {error.name!r}; {how}", err=True)
        sys.exit(2)


def _extra_that_brings(error: ModuleNotFoundError) -> str | None:
    """The extra whose part was being imported when a library was missing; None if the fault is somebody else's."""
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
