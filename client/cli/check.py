"""`umbel client check`: check one's own client, without a coordinator."""

from pathlib import Path
from typing import Annotated

import typer

from umbel.client.cli.options import App, AsJson


def check(
    app: App,
    run_file: Annotated[
        Path | None,
        typer.Option(
            "--run-file",
            metavar="FILE",
            help="A run file. Checks with its sections training, codec and tensors; by default with usual settings.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=4, help="Local steps of each training. There are some fifteen trainings.")
    ] = 6,
    as_json: AsJson = False,
) -> None:
    """Check your own client in this process, without a coordinator, and say in words what is wrong with it.

    The client trains from the same weights several times, is told to stop, takes part in two rounds and a secure round,
    and is killed in the middle of a training. The exit status is 1 if something is wrong.
    """
    from umbel.client.check import check_client
    from umbel.client.cli.output import one_sentence_errors, print_json, print_table
    from umbel.client.operator.run_files import read_run_file
    from umbel.client.user_code import load_app

    with one_sentence_errors():
        file = None if run_file is None else read_run_file(run_file)[1]
        found = check_client(lambda: load_app(app), file, steps=steps)
    if as_json:
        print_json(found)
    else:
        print_table(
            ("check", "", "what was found", "what to do"),
            [(one.check, one.verdict, one.found, one.advice) for one in found.findings],
        )
    if found.wrong:
        raise typer.Exit(1)
