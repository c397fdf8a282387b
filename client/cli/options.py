"""Flags that several verbs share, and the connection that an operator's flags describe."""

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def _no_server() -> str:
    raise typer.BadParameter(
        "no coordinator: pass --server, or set its variable: export UMBEL_SERVER=http://127.0.0.1:8750"
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
        help="The coordinator's address, such as https://fl.example.org[:port], or its replicas' addresses. Required.",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        envvar="UMBEL_ADMIN_KEY_FILE",
        help="File with the admin key. Without it, the key itself must be in UMBEL_ADMIN_KEY.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
AllColumns = Annotated[
    bool, typer.Option("--all", help="Show all columns of the tables, however wide. By default they fit the terminal.")
]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="The run's name.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation; for scripts.")]
State = Annotated[Path, typer.Option("--state", help="The client's own directory, for its key and its unsent work.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="UMBEL_TOKEN",
        help="The one-time token from the operator; needed at the first start only.",
    ),
]
ClientName = Annotated[
    str | None, typer.Option("--name", help="The client's name. By default it is made from the host's name.")
]
Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="NAME=VALUE",
        help="A fact about this site that the coordinator's operator sees; may be repeated.",
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE", help="The site's policy, in TOML: limits that no coordinator can change."),
]
VERSION_METAVAR = "VERSION|best"


def operator_verb(action: Callable[..., None]) -> Callable[..., None]:
    """Make a verb of an action on an operator: the flags of the connection take the place of its first argument.

    Errors become one sentence and exit status 1.
    """

    def verb(server: str, admin_key_file: Path | None, **flags: Any) -> None:
        from umbel.client.cli.output import one_sentence_errors
        from umbel.client.operator.operator import Operator

        with one_sentence_errors(), Operator(server, _admin_key(admin_key_file)) as operator:
            action(operator, **flags)

    _, *own = inspect.signature(action).parameters.values()
    connection = inspect.signature(_connection_flags).parameters
    required = [one for one in own if one.default is one.empty]
    optional = [one for one in own if one.default is not one.empty]
    flags = [*required, connection["server"], *optional, connection["admin_key_file"]]
    verb.__doc__ = action.__doc__
    verb.__annotations__ = {one.name: one.annotation for one in flags}
    setattr(verb, "__signature__", inspect.Signature(flags))  # noqa: B010 - functions declare no such attribute
    return verb


def _connection_flags(server: Server, admin_key_file: KeyFile = None) -> None:
    """The flags that `operator_verb` adds."""


def version_or_best(flag: str, text: str) -> int | Literal["best"]:
    """A model version as a flag names it. Raises `ValueError`."""
    if text == "best":
        return "best"
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError(f"{flag} must be a version's number, or best, not {text!r}")
    return int(text)


def labels_of(texts: Sequence[str]) -> dict[str, str]:
    """The labels of every `--label NAME=VALUE`. Raises `ValueError`."""
    return dict(map(_label, texts))


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--label must look like name=value, such as tier=hospital, not {text!r}")
    return name, value


def _admin_key(path: Path | None) -> str:
    if path is not None and not path.is_file():
        raise ValueError(
            f"there is no file {path}: the admin key is in the file admin.key in the coordinator's data directory; "
            "name that file with --admin-key-file or UMBEL_ADMIN_KEY_FILE"
        )
    key = (path.read_text(errors="replace") if path is not None else os.environ.get("UMBEL_ADMIN_KEY", "")).strip()
    if path is not None and not key:
        raise ValueError(f"{path} is empty: name the file that holds the coordinator's admin key")
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"{path or 'UMBEL_ADMIN_KEY'} holds no admin key: a key is one line of printable ASCII")
    if not key:
        raise ValueError(
            "no admin key: the coordinator wrote it to admin.key in its data directory. Name that file and try again: "
            "export UMBEL_ADMIN_KEY_FILE=umbel-data/admin.key. Or pass --admin-key-file, or set UMBEL_ADMIN_KEY to the "
            "key itself"
        )
    return key
