"""Flags and arguments that several of the command line's verbs have."""

from pathlib import Path
from typing import Annotated

import typer


def _no_server() -> str:
    raise typer.BadParameter(
        "which coordinator? Say its address, and try again: export UMBEL_SERVER=http://127.0.0.1:8750"
    )


SERVER_VARIABLE = "UMBEL_SERVER"
SERVER_METAVAR = "URL[,URL...]"
Server = Annotated[
    str,
    typer.Option(
        "--server",
        default_factory=_no_server,
        show_default=False,
        envvar=SERVER_VARIABLE,
        metavar=SERVER_METAVAR,
        help="The coordinator's address, such as https://fl.example.org[:port], or those of its replicas; required.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        envvar="UMBEL_ADMIN_KEY_FILE",
        help="File that holds the admin key; else the variable UMBEL_ADMIN_KEY is read.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="The run's name.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation, as in a script.")]
