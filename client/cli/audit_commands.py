"""The command line's verbs for an auditor: `run audit` and `run replay`. What they do is in `audit_console.py`."""

from pathlib import Path
from typing import Annotated

import typer

from umbel.client.cli.flags import AsJson, KeyFile, RunName, Server

Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="The coordinator's public audit key, from a source that you trust; may be repeated. "
        "Without it, the key that the coordinator itself tells.",
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option("--head", metavar="SHA256", help="A head noted earlier, which the chain must hold; may be repeated."),
]


def _no_key() -> list[str]:
    raise typer.BadParameter(
        "whose signatures? Pass the public audit key, --key KEY; umbel serve prints it at its start, umbel run audit "
        "NAME tells it"
    )


def audit_run(
    run: RunName,
    server: Server,
    out: Annotated[Path | None, typer.Option("--out", help="Write the bundles there, one a line.")] = None,
    key: Keys = None,
    head: Heads = None,
    admin_key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Download a run's audit bundles and verify them: hashes, signatures, links, models, clients' own reports."""
    from umbel.client.cli import audit_console, console

    with console.operator_at(server, admin_key_file) as operator:
        audit_console.audit_run(operator, run, out, key or (), head or (), as_json)


def verify_file(
    file: Annotated[Path, typer.Argument(help="What `umbel run audit --out` has written.")],
    key: Annotated[
        list[str],
        typer.Option(
            "--key",
            metavar="KEY",
            default_factory=_no_key,
            show_default=False,
            help="The public audit key, required; may be repeated.",
        ),
    ],
    head: Heads = None,
    as_json: AsJson = False,
) -> None:
    """Verify a file of audit bundles without a coordinator."""
    from umbel.client.cli import audit_console, output

    with output.one_sentence_errors():
        audit_console.verify_file(file, key, head or (), as_json)


def replay_run(
    run: RunName,
    server: Server,
    round_: Annotated[int | None, typer.Option("--round", min=1, help="The round to make again.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Make every committed round again.")] = False,
    key: Keys = None,
    head: Heads = None,
    admin_key_file: KeyFile = None,
) -> None:
    """Make a round again from what the coordinator kept. Exit status 0 only if it comes to the same model hash."""
    from umbel.client.cli import audit_console, console

    if (round_ is None) is not all_:
        raise typer.BadParameter(
            f"say which round: umbel run replay {run} --round 1; or all: umbel run replay {run} --all"
        )
    with console.operator_at(server, admin_key_file) as operator:
        audit_console.replay_run(operator, run, round_, key or (), head or ())
