"""`umbel train`: the data-center path. Imports wait until it runs, as it needs torch."""

from pathlib import Path
from typing import Annotated

import typer

from umbel.client.cli.options import AsJson


def train(
    run_file: Annotated[
        Path, typer.Argument(help="The run file (TOML), as of `umbel run create`.", show_default=False)
    ],
    app: Annotated[
        str,
        typer.Option(
            "--app",
            metavar="MODULE:NAME",
            help="The client of each rank: a Client, a function without parameters that returns one, or "
            "make_client(number, of), which gets the rank and the number of ranks.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="The folder for rounds.jsonl, model.safetensors and summary.json. A run in it goes on."),
    ] = Path("train-out"),
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="The first model (safetensors); else that of rank 0's client. A run that goes on ignores it.",
        ),
    ] = None,
    ranks_per_client: Annotated[
        int,
        typer.Option(
            "--ranks-per-client",
            min=1,
            help="How many ranks train together as one client. With more than one, the app is make_client(number, of, "
            "mesh), which also gets the mesh of the client's ranks.",
        ),
    ] = 1,
    shared_data: Annotated[
        bool, typer.Option("--shared-data", help="Ranks may train on the same samples; else that is an error.")
    ] = False,
    compare_updates: Annotated[
        bool,
        typer.Option(
            "--compare-updates",
            help="Also measure the norms of the ranks' updates, and the cosines between each and their mean. This "
            "takes a pass over the model in each round.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help="Also write event files for TensorBoard, to the folder tensorboard in --out, while the run goes on. "
            "It needs the extra tensorboard of umbel.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train in a data center: every rank of a torchrun job is a client (with --ranks-per-client, every few ranks are
    one), and the network adds up their work. You get the models that a coordinator with the same clients and seeds
    would make, bit for bit. Sums go over NCCL if every rank has a GPU of its own, else over Gloo. Nothing is masked
    inside the group. Without torchrun, one process is the only rank. After a kill of any rank the same command goes on
    from the last checkpoint; torchrun --max-restarts 3 does so by itself.

    torchrun --standalone --nproc-per-node 4 -m umbel train RUN.toml --app module:make_client
    """
    from umbel.aggregation.messages import RunStatus
    from umbel.aggregation.phrases import counted
    from umbel.aggregation.run.records import Fate
    from umbel.client.cli.output import figures, log_to_stderr, one_sentence_errors, print_json
    from umbel.client.cli.view_rounds import name_of
    from umbel.client.datacenter.train.federation import GroupAttempt
    from umbel.client.datacenter.train.train import train_run
    from umbel.client.operator.run_files import read_run_file

    def told(attempt: GroupAttempt) -> None:
        if as_json:
            return
        record, cost = attempt.record, attempt.cost
        measured = figures({**record.metrics, **{f"held-out {name}": one for name, one in record.evaluation.items()}})
        clients = "ranks" if ranks_per_client == 1 else "clients"
        outcome = f"{record.reported} of {record.selected} {clients}" if record.committed else record.reason
        declined = [f"{one.client}: {one.reason}" for one in record.clients if one.fate is Fate.DECLINED]
        outcome = "; ".join([outcome, *declined])
        times = f"{record.wall_s:.1f} s (train {cost.train_s:.1f}, wait {cost.wait_s:.1f}, sum {cost.sum_s:.1f})"
        typer.echo(f"{name_of(record)}: {outcome}, {times}  {measured}")

    log_to_stderr()
    with one_sentence_errors():
        end, is_first = train_run(
            read_run_file(run_file)[1],
            app,
            out,
            model,
            told,
            ranks_per_client=ranks_per_client,
            may_share=shared_data,
            compares_updates=compare_updates,
            writes_events=tensorboard,
        )
    if end is None:  # the first rank of this one's client knows more
        return
    if is_first and as_json:
        print_json(end)
    elif is_first:
        ended = f"{end.status.value}: {end.reason}"
        if end.leaving:
            ended = f"{end.leaving}; start the same command again to go on"
        typer.echo(f"{ended}. The model of {counted(end.rounds, 'round')} is {end.model}")
    if end.leaving or end.status is RunStatus.FAILED:
        raise typer.Exit(1)
