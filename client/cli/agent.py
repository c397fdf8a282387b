"""The verb `umbel agent`. Imports wait until it runs."""

from typing import Annotated

import typer

from umbel.client.cli.options import (
    ClientName,
    Labels,
    Policy,
    Server,
    State,
    Token,
    labels_of,
)
from umbel.client.state.state_dir import STATE_DEFAULT

_APP_HELP = (
    "Your code for the runs that the pattern names, such as 'heart-*=my_hospital:client'; may be repeated, and the "
    "first match counts. Without a pattern: for every run. UMBEL_APP may hold several, separated by spaces."
)


def agent(
    server: Server,
    app: Annotated[
        list[str], typer.Option("--app", envvar="UMBEL_APP", metavar="[PATTERN=]MODULE:NAME", help=_APP_HELP)
    ],
    token: Token = None,
    name: ClientName = None,
    label: Labels = None,
    state: State = STATE_DEFAULT,
    policy: Policy = None,
    at_once: Annotated[
        int, typer.Option("--at-once", metavar="N", help="How many runs may train at the same time; others wait.")
    ] = 2,
) -> None:
    """Take part in every run that this site allows, until Ctrl-C or SIGTERM.

    If the policy neither allows nor refuses a run, a person decides: umbel site runs, allow, deny.
    """
    from umbel.client.agent.agent import AgentOptions, FirstStart, run_agent
    from umbel.client.agent.apps import app_rule
    from umbel.client.cli.output import log_to_stderr, one_sentence_errors

    log_to_stderr()
    with one_sentence_errors():
        rules = tuple(app_rule(one) for one in app)
        limits = None if policy is None else policy.expanduser()
        options = AgentOptions(server, state.expanduser(), rules, limits, at_once)
        why = run_agent(options, FirstStart(token, name, labels_of(label or ())))
    typer.echo(f"the agent has ended: {why}")
