"""`umbel demo` and `umbel bench`. Heavy libraries are imported when a command runs, so that `--help` is quick."""

import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from umbel.sim.bench.report import Report

_STDOUT, _STDERR = 1, 2
bench_app = typer.Typer(help="Measure umbel against plain baselines, peers and physical limits.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repetitions: one to ten minutes.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write a picture (PNG) of the results here.")]
PeerOption = Annotated[
    Path | None,
    typer.Option(
        "--peer-python", help="A Python in which the peers (Flower or pfl) are installed; they are then measured too."
    ),
]


def demo(
    out: Annotated[Path, typer.Option(help="The folder for rounds.jsonl and curves.png.")] = Path("demo-out"),
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the split, the model and all random draws.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, max=500, help="Rounds to train.")] = 24,
    calm: Annotated[
        bool, typer.Option(help="No kills and no slow clients. With --plain, the same seed gives the same model.")
    ] = False,
    plain: Annotated[bool, typer.Option(help="Do not mask updates: the coordinator can read them.")] = False,
    keep: Annotated[
        bool, typer.Option(help="Keep the files of the coordinator and the clients, in a folder in OUT.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train one model on real data with a coordinator and twelve clients, in five processes on this machine.

    Two clients are slow. With --rounds 4 or more, another client is killed in the middle of a round, and the slow
    clients' partial work takes its place. The killed client returns about five rounds later, so give --rounds 12 or
    more to see it return. With --rounds 6 or more, the coordinator is killed in the middle of a round as well, and
    resumes over the same files. Updates are masked, so the coordinator learns only their sum. Two officers have signed
    the list of the clients' keys, and every client has pinned this list. At the end the audit chain is verified. With
    --plain there are no masks and no list, and the last round is replayed from the stored updates.
    """
    from dataclasses import asdict

    from rich.console import Console

    from umbel.aggregation.audit.bundle import AuditFailed
    from umbel.client import ClientError
    from umbel.sim.demo.demo import DemoFailed, run_demo
    from umbel.sim.demo.kills import ReportLost
    from umbel.sim.demo.plan import make_plan
    from umbel.sim.demo.summary import table
    from umbel.sim.processes import ChildDied

    console = Console(stderr=json)
    with _ends_with_a_sentence(DemoFailed, ReportLost, AuditFailed, ChildDied, ClientError, TimeoutError, OSError):
        summary = run_demo(make_plan(seed, rounds, calm=calm, plain=plain), out, console, keep=keep)
    if json:
        _print_json(asdict(summary))
    else:
        console.print(table(summary, out))


def simulate(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The experiment: a TOML file (docs/reference/experiment-file.md). A Flower app needs none.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="The folder for rounds.jsonl, summary.json and curves.png; an existing run there is resumed."
        ),
    ] = Path("simulate-out"),
    data: Annotated[
        Path | None,
        typer.Option(envvar="UMBEL_DATA", help="The folder with the files of data sets; missing files are fetched."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Replace a value of the file, such as rounds.count=5; may be repeated."
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Simulate the clients that this function makes: make_client(number, of) or "
            "make_client(number, of, data). Sets clients.app.",
        ),
    ] = None,
    flower_app: Annotated[
        Path | None,
        typer.Option(
            "--flower-app",
            metavar="FOLDER",
            help="Simulate this Flower app, with its own ServerApp and strategy. Sets flower.app. It needs the extra "
            "flower of umbel.",
        ),
    ] = None,
    run_config: Annotated[
        str | None,
        typer.Option(
            "--run-config", metavar="PAIRS", help="Overrides of the Flower app's configuration, as flwr run takes them."
        ),
    ] = None,
    native: Annotated[
        bool,
        typer.Option(
            "--native",
            help="With a Flower app: umbel's own rounds take the place of its strategy (FedAvg or FedProx), so that "
            "codecs, masks and checkpoints apply.",
        ),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help="Also write event files for TensorBoard, to the folder tensorboard in --out, while the runs go on. "
            "It needs the extra tensorboard of umbel.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Simulate a federation of many clients in virtual time, with the coordinator's own code for rounds.

    After Ctrl-C or a kill, the same command resumes and ends in the same models; the interrupted run of a Flower app
    begins again, because its ServerApp cannot be resumed. The exit status is 1 if all runs of the experiment failed.
    """
    from umbel.aggregation.messages import RunStatus

    with _ends_with_a_sentence(when_interrupted="interrupted before the simulation began"):
        from umbel.sim.console import EXPECTED, changes_of, flower_changes, run  # which brings torch: a second or two

    goes_on = "interrupted; run the same command again to resume"
    changes = [*(change or []), *([] if app is None else [f"clients.app={app}"])]
    with (
        _ends_with_a_sentence(*EXPECTED, when_interrupted=goes_on),
        _standard_output_for_us() if json else nullcontext(),
    ):
        changed = {**flower_changes(flower_app, run_config), **changes_of(changes)}
        found = run(file, out, data, changed, quiet=json, native=native, tensorboard=tensorboard)
    if json:
        _print_json(found.summary())
    if all(one.status is RunStatus.FAILED for one in found.trials):
        sys.exit(1)


def _bench(measure: "Callable[[], Report]", as_json: bool, *expected: type[Exception]) -> None:
    """Measure and print. A broken promise or an expected error ends with a sentence and a non-zero exit."""
    from rich.console import Console

    from umbel.aggregation.errors import UpdateRefused
    from umbel.client import ClientError
    from umbel.sim.bench.report import BenchFailed
    from umbel.sim.data.sets.mnist import NotIdx
    from umbel.sim.processes import ChildDied

    with _ends_with_a_sentence(
        *(BenchFailed, ChildDied, ClientError, NotIdx, TimeoutError, UpdateRefused, OSError),
        *expected,
    ):
        report = measure()
    if as_json:
        _print_json(report.to_json())
    else:
        Console().print(report.to_table())
    if report.broken:
        missed = "; ".join(row.sentence for row in report.broken)
        typer.echo(f"umbel: this run missed a promised figure: {missed}", err=True)
        sys.exit(1)


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value))


@contextmanager
def _ends_with_a_sentence(
    *expected: type[Exception], when_interrupted: str = "interrupted; all processes are stopped"
) -> Generator[None]:
    """Turn an expected failure into one sentence and a non-zero exit; a signal ends the processes first."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except expected as error:
        typer.echo(f"umbel: {error}", err=True)
        sys.exit(1)
    except SystemExit as error:  # umbel's own code never exits here
        typer.echo(f"umbel: the experiment's own code ended the program (status {error.code})", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo(f"umbel: {when_interrupted}", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _standard_output_for_us() -> Generator[None]:
    """Send the output of the experiment's own code and of child processes to standard error."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@bench_app.command("coordinator")
def bench_coordinator(
    quick: QuickOption = False,
    peer_python: PeerOption = None,
    devices: Annotated[int, typer.Option(min=1000, help="Number of simulated devices in the load test.")] = 10_000,
    soak: Annotated[float, typer.Option(min=0.0, help="Seconds of steady load after the load test.")] = 0.0,
    json: JsonOption = False,
) -> None:
    """Rounds without work: ten clients over HTTP; check-ins of ten thousand devices, and a round of 300 of them.

    --peer-python names an interpreter that has flwr. Flower's deployment engine then runs the same rounds.
    """
    from umbel.sim.bench.coordinator.bench import measure

    _bench(lambda: measure(quick=quick, peer_python=peer_python, n_devices=devices, soak_s=soak), json)


@bench_app.command("aggregate")
def bench_aggregate(quick: QuickOption = False, json: JsonOption = False) -> None:
    """The coordinator's memory while forty clients upload at once, and how fast it adds up updates."""
    from umbel.sim.bench.aggregate import measure

    _bench(lambda: measure(quick=quick), json)


@bench_app.command("window")
def bench_window(
    quick: QuickOption = False,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """The self-tuned window against a fixed one that asks 130 % of the target: useful client time on three fleets."""
    from umbel.sim.bench.window import measure

    _bench(lambda: measure(quick=quick, plot=plot), json)


@bench_app.command("sampling")
def bench_sampling(
    quick: QuickOption = False,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar="UMBEL_DATA", help="The folder with MNIST's four files in mnist/; missing files are fetched."
        ),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Clients drawn in proportion to their samples, against uniform draws: bias and error of a round's mean change."""
    from umbel.sim.bench.sampling.bench import measure
    from umbel.sim.data.data_set import DataError

    _bench(lambda: measure(quick=quick, data=data, plot=plot), json, DataError)


@bench_app.command("codec")
def bench_codec(
    quick: QuickOption = False,
    plot: PlotOption = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with MNIST's four files in mnist/: also train with every codec, half an hour."),
    ] = None,
    curves: Annotated[Path | None, typer.Option(help="Write a picture (PNG) of the training with --data here.")] = None,
    json: JsonOption = False,
) -> None:
    """Error, bytes and time of the integer codec, against theory, EDEN and a memory copy; with --data, its accuracy."""
    from umbel.sim.bench.codec.bench import measure

    if curves is not None and data is None:
        raise typer.BadParameter(
            "--curves draws the training, which needs --data; pass --data too, or leave out --curves"
        )
    _bench(lambda: measure(quick=quick, plot=plot, data=data, curves=curves), json)


@bench_app.command("simulate")
def bench_simulate(
    quick: QuickOption = False,
    only: Annotated[
        str | None,
        typer.Option(
            help="Run only this part: A, B, C, Cs, M, clients, start or cohorts "
            "(see docs/explanation/results/simulation.md)."
        ),
    ] = None,
    peer_python: PeerOption = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device for the part `cohorts`: cpu or cuda; by default a GPU, if there is one."),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Simulated rounds against a plain loop: small and large models, long tails, a million clients.

    --peer-python names an interpreter that has pfl or flwr (with its extra `simulation`). These then train the same
    rounds, for ten minutes or more. On a GPU, or with --device, cohorts of 1 to 1000 clients are trained both stacked
    and one client after another.
    """
    from umbel.sim.bench.simulate.bench import NoSuchWorkload, measure
    from umbel.sim.engines.device import NoSuchDevice
    from umbel.sim.engines.work import EngineError

    _bench(
        lambda: measure(quick=quick, only=only, peer_python=peer_python, device=device, plot=plot),
        json,
        *(NoSuchWorkload, NoSuchDevice, EngineError),
    )


@bench_app.command("flower")
def bench_flower(
    quick: QuickOption = False,
    only: Annotated[str | None, typer.Option(help="Run only this app: quickstart, small or large.")] = None,
    peer_python: PeerOption = None,
    json: JsonOption = False,
) -> None:
    """A Flower app, unchanged: its rounds under umbel's simulator, in a plain loop, and under Flower's own engine.

    It needs the extra `flower` of umbel. --peer-python names an interpreter that has flwr (with its extra
    `simulation`), torch and scikit-learn. Flower's simulation engine then runs the same app there, with an actor for
    each core.
    """
    from umbel.sim.bench.flower.bench import NoSuchApp, measure

    _bench(lambda: measure(quick=quick, only=only, peer_python=peer_python), json, NoSuchApp)


@bench_app.command("secagg")
def bench_secagg(
    quick: QuickOption = False,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Secure aggregation: the time of masks, client and coordinator, and bytes, against lower limits and Flower."""
    from umbel.sim.bench.secagg.bench import measure

    _bench(lambda: measure(quick=quick, plot=plot), json)


@bench_app.command("collective")
def bench_collective(
    quick: QuickOption = False,
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Number of ranks, each a process of this machine.")] = 2,
    rates: Annotated[
        str,
        typer.Option(
            help="Rates of the ranks' links in Mbit/s, such as 100,1000: each in a run of its own. "
            "Needs root on Linux; without them, ranks use the loopback.",
            show_default=False,
        ),
    ] = "",
    round_trip_ms: Annotated[
        float | None,
        typer.Option(min=0.1, max=10_000.0, help="Also measure the slowest of these links with this delay."),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="Instead of gradients, average the models after every 1, 8, 32 and 128 steps (DiLoCo), and say how "
            "busy the processors are with training.",
        ),
    ] = False,
    losses: Annotated[
        bool, typer.Option("--losses", help="Also compare losses after equal steps, with --data, some ten minutes.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar="UMBEL_DATA",
            help="For --losses: the folder with Fashion-MNIST in fashion_mnist/, whose missing files are fetched, and "
            "the plays in shakespeare/ (not needed with --quick).",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """A step of data parallelism over a slow network: umbel's hook against torch's float32, bf16 and PowerSGD."""
    from umbel.sim.bench.collective.bench import measure, rates_of
    from umbel.sim.bench.collective.grid import measure_grid
    from umbel.sim.data.data_set import DataError

    try:
        of_links = rates_of(rates)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rates") from error
    if losses and data is None:
        raise typer.BadParameter("--losses trains on data sets; pass their folder with --data too")
    if round_trip_ms is not None and not of_links:
        raise typer.BadParameter("--round-trip-ms delays a link of --rates; pass --rates too, such as --rates 100")
    if grid and round_trip_ms is not None:
        raise typer.BadParameter("--grid has no link with a delay; leave out --round-trip-ms")
    if grid:
        _bench(
            lambda: measure_grid(quick=quick, n_ranks=ranks, rates=of_links, losses=losses, data=data), json, DataError
        )
        return
    _bench(
        lambda: measure(
            quick=quick, n_ranks=ranks, rates=of_links, round_trip_ms=round_trip_ms, losses=losses, data=data
        ),
        json,
        DataError,
    )
