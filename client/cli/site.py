"""The verbs of a site: `umbel join` and `umbel fingerprint`. Imports wait until a verb runs, as `join` needs torch."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from umbel.client.cli.flower import EitherApp, FirstModel, FlowerApp, NamedApp, NodeConfig, RunConfig, SampleCount
from umbel.client.cli.options import (
    SERVER_METAVAR,
    SERVER_VARIABLE,
    AsJson,
    ClientName,
    Labels,
    Policy,
    Server,
    State,
    Token,
    labels_of,
)
from umbel.client.state.state_dir import STATE_DEFAULT


def join(
    server: Server,
    run: Annotated[str, typer.Option("--run", help="The run to take part in.")],
    app: EitherApp = None,
    flower_app: FlowerApp = None,
    token: Token = None,
    name: ClientName = None,
    label: Labels = None,
    state: State = STATE_DEFAULT,
    policy: Policy = None,
    run_config: RunConfig = None,
    node_config: NodeConfig = None,
    sample_count: SampleCount = None,
    model: FirstModel = None,
    give_up_after: Annotated[
        float | None,
        typer.Option(
            "--give-up-after",
            metavar="SECONDS",
            min=0.1,
            help="End with an error when the coordinator has given no usable answer for this long. By default the "
            "client asks until it gets one.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take part in a run until it ends or you press Ctrl-C: enrol (once), then check in, train and report. Under
    torchrun, all ranks together are one client.
    """
    from umbel.aggregation.messages import RunStatus
    from umbel.client.cli.output import log_to_stderr, one_sentence_errors, print_result
    from umbel.client.loop import RunEnd, run_client
    from umbel.client.policy.policy import read_policy

    log_to_stderr()
    with one_sentence_errors():
        site = NamedApp(app, flower_app, run_config, node_config, sample_count, model)
        limits = None if policy is None else read_policy(policy.expanduser())
        place = state.expanduser()
        terms: dict[str, Any] = {"token": token, "name": name, "labels": labels_of(label or ()), "policy": limits}
        if give_up_after is not None:
            terms["give_up_after_s"] = give_up_after
        with _names_policy(policy):
            end: RunEnd | None
            if {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # of torchrun
                from umbel.client.datacenter.silo.run import run_silo

                end = run_silo(site.make, server, place, run, **terms)
            else:
                end = run_client(site.make(), server, place, run, **terms)
    if end is None:  # rank 0 prints
        return
    print_result(end, f"{end.run} {end.status}: {end.reason} ({end.reports_in_words})", as_json)
    if end.status == RunStatus.FAILED:
        raise typer.Exit(1)


def show_fingerprint(
    state: State = STATE_DEFAULT,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            envvar=SERVER_VARIABLE,
            metavar=SERVER_METAVAR,
            help="Make a key for this coordinator if the state directory has none yet.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show this client's public key and its fingerprint. An officer compares the fingerprint and lists the key."""
    from umbel.client.cli.output import one_sentence_errors, print_json
    from umbel.client.state.identity import make_own_key, own_keys

    with one_sentence_errors():
        if server is not None:
            make_own_key(state.expanduser(), server)
        keys = own_keys(state.expanduser())
    if as_json:
        print_json(keys)
        return
    for key in keys:
        who = f"{key.client} at {key.server}" if key.client else "not enrolled yet"
        typer.echo(f"{who} ({key.directory})\npublic key   {key.public_key}\nfingerprint  {key.fingerprint}")


@contextmanager
def _names_policy(policy: Path | None) -> Generator[None]:
    """Put the policy's file name before what is wrong with its member list."""
    from umbel.aggregation.trust.members import MembersRefused

    try:
        yield
    except MembersRefused as error:
        raise MembersRefused(f"{policy}: {error}") from error  # without a policy no list is read
