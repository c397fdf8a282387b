"""`umbel client check`, which checks one's own client, and `umbel doctor`, which checks the machine that it runs on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from umbel.client.cli.flower import EitherApp, FirstModel, FlowerApp, NamedApp, NodeConfig, RunConfig, SampleCount
from umbel.client.cli.options import SERVER_METAVAR, SERVER_VARIABLE, AsJson, Policy, State
from umbel.client.state.state_dir import STATE_DEFAULT

if TYPE_CHECKING:
    from umbel.client.datacenter.doctor.doctor import GroupCheck
    from umbel.client.findings import ClientCheck


def check(
    app: EitherApp = None,
    flower_app: FlowerApp = None,
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
    run_config: RunConfig = None,
    node_config: NodeConfig = None,
    sample_count: SampleCount = None,
    model: FirstModel = None,
    as_json: AsJson = False,
) -> None:
    """Check your own client in this process, without a coordinator, and say in words what is wrong with it.

    The client trains from the same weights several times, is told to stop, takes part in two rounds and a secure round,
    and is killed in the middle of a training. The exit status is 1 if something is wrong.
    """
    from umbel.client.check import check_client
    from umbel.client.cli.output import one_sentence_errors
    from umbel.client.operator.run_files import read_run_file

    with one_sentence_errors():
        site = NamedApp(app, flower_app, run_config, node_config, sample_count, model)
        file = None if run_file is None else read_run_file(run_file)[1]
        found = check_client(site.make, file, steps=steps)
    show_findings(found, as_json)


def doctor(
    run_file: Annotated[
        Path | None,
        typer.Argument(help="With --distributed: a run file (TOML), whose training is timed.", show_default=False),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            envvar=SERVER_VARIABLE,
            metavar=SERVER_METAVAR,
            help="The coordinator's address. Without it, the way to the coordinator is not checked.",
        ),
    ] = None,
    state: State = STATE_DEFAULT,
    policy: Policy = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Check the ranks of a torchrun job and their network in the place of this machine's client.",
        ),
    ] = False,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:NAME",
            help="With --distributed and a run file: the client of each rank, as for umbel train.",
        ),
    ] = None,
    ranks_per_client: Annotated[
        int,
        typer.Option(
            "--ranks-per-client",
            min=1,
            help="With --distributed, a run file and --app: how many ranks train together as one client, as for umbel "
            "train.",
        ),
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine is ready for a client: versions, disk, state directory, policy, and the way to the
    coordinator with its proxy, certificate and clock. If a client is enrolled here, check also that the coordinator
    still accepts it. It changes nothing, needs no token, and prints no secret. The exit status is 1 if something is
    wrong.

    With --distributed, check the ranks of a job in a data center: that they
    have the same versions, and how fast their network is. With a run file and
    --app, also time the steps of these clients: whether they wait for data or
    for the network, whether the model fits, and how often to add up in how
    many bits. With --ranks-per-client, a step is one of a whole client. Rank 0
    prints what was found.

    torchrun --standalone --nproc-per-node 4 -m umbel doctor --distributed [RUN.toml --app module:make_client]
    """
    from umbel.client.cli.output import one_sentence_errors

    if (run_file is None) != (app is None) or (app is not None and not distributed):
        raise typer.BadParameter("a run file and --app go together, and with --distributed")
    if ranks_per_client > 1 and app is None:
        raise typer.BadParameter("--ranks-per-client goes with --distributed, a run file and --app")
    if distributed:
        _doctor_of_group(run_file, app, ranks_per_client, as_json)
        return
    from umbel.client.check.site_checks import check_site

    with one_sentence_errors():
        found = check_site(server, state.expanduser(), None if policy is None else policy.expanduser())
    show_findings(found, as_json)


def _doctor_of_group(run_file: Path | None, app: str | None, ranks_per_client: int, as_json: bool) -> None:
    from umbel.client.cli.output import one_sentence_errors
    from umbel.client.datacenter.doctor.doctor import check_group
    from umbel.client.operator.run_files import read_run_file

    with one_sentence_errors():
        file = None if run_file is None else read_run_file(run_file)[1]
        found, is_first = check_group(file, app, ranks_per_client)
    if is_first:
        show_findings(found, as_json)
    elif found.wrong:
        raise typer.Exit(1)


def show_findings(found: "ClientCheck | GroupCheck", as_json: bool) -> None:
    """Print what was found. Exit with status 1 if something is wrong."""
    from umbel.client.cli.output import print_json, print_table, table_width

    if as_json:
        print_json(found)
    else:
        print_table(
            ("check", "", "what was found", "what to do"),
            [(one.check, one.verdict, one.found, one.advice) for one in found.findings],
            table_width(shows_all=False),
        )
    if found.wrong:
        raise typer.Exit(1)
