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
bench_app = typer.Typer(help="Measured: ours, a plain baseline, the peer, the limit.", no_args_is_help=True)
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repetitions: a minute or two.")]


def demo(
    out: Annotated[Path, typer.Option(help="Where rounds.jsonl and curves.png go.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="For the split, the model, every draw.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, max=500, help="Rounds to train.")] = 24,
    calm: Annotated[
        bool, typer.Option(help="Kill and slow down nobody. With --plain, the same seed gives the same model.")
    ] = False,
    plain: Annotated[bool, typer.Option(help="Updates that the coordinator can read, not masked ones.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the files of coordinator and clients, in a folder in OUT.")] = False,
    json: JsonOption = False,
) -> None:
    """A coordinator and twelve clients in five processes train one model on real data, on this machine.

    Two clients are slow. From --rounds 4 on, one of the others is killed in the middle of a round, and the slow ones'
    partial work fills its place; some five rounds later it comes back (12 rounds are enough to see it). Meanwhile, from
    --rounds 6 on, the coordinator is killed in the middle of a round as well, and goes on over the same files. Updates
    are masked: the coordinator learns their sum alone, of clients that are on a list of keys which two officers have
    signed and every client has pinned. At the end the audit chain is verified. With --plain there are no masks and no
    list, and the last round is made again from what is stored.
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
        Path,
        typer.Argument(help="The experiment: a TOML file (docs/reference/experiment-file.md).", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option(help="Where rounds.jsonl, summary.json and curves.png go; what is there is gone on with.")
    ] = Path("simulate-out"),
    data: Annotated[
        Path | None, typer.Option(envvar="UMBEL_DATA", help="The folder of data sets that are read from files.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Put a value in the place of the file's: rounds.count=5."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Simulate a federation of many clients in virtual time, through the coordinator's own rounds.

    Broken off with Ctrl-C, or killed, the same command goes on where it was, and ends in the same models. It exits with
    1 where no run of the experiment has come to its end.
    """
    from umbel.aggregation.messages import RunStatus

    with _ends_with_a_sentence(when_interrupted="interrupted before anything was begun"):
        from umbel.sim.console import EXPECTED, run  # which brings torch: a second or two

    goes_on = "interrupted; the same command goes on where it was"
    with (
        _ends_with_a_sentence(*EXPECTED, when_interrupted=goes_on),
        _standard_output_for_us() if json else nullcontext(),
    ):
        found = run(file, out, data, change or [], quiet=json)
    if json:
        _print_json(found.summary())
    if all(one.status is RunStatus.FAILED for one in found.trials):
        sys.exit(1)


def _bench(measure: "Callable[[], Report]", as_json: bool, *expected: type[Exception]) -> None:
    """Measure and print; a broken promise, or an error `expected` too, ends with a sentence and a non-zero exit."""
    from rich.console import Console

    from umbel.aggregation.errors import UpdateRefused
    from umbel.client import ClientError
    from umbel.sim.bench.coordinator.flower import FlowerFailed
    from umbel.sim.bench.coordinator.http_load import LoadFailed
    from umbel.sim.bench.simulate.peer_run import PeerFailed
    from umbel.sim.data.sets.mnist import NotIdx
    from umbel.sim.processes import ChildDied

    with _ends_with_a_sentence(
        *(ChildDied, ClientError, FlowerFailed, LoadFailed, NotIdx, PeerFailed, TimeoutError, UpdateRefused, OSError),
        *expected,
    ):
        report = measure()
    if as_json:
        _print_json(report.to_json())
    else:
        Console().print(report.to_table())
    if report.broken:
        missed = "; ".join(row.sentence for row in report.broken)
        typer.echo(f"umbel: this run missed a promise: {missed}", err=True)
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
    except SystemExit as error:  # nothing of ours does that in here
        typer.echo(f"umbel: the experiment's own code ended the program (status {error.code})", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo(f"umbel: {when_interrupted}", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _standard_output_for_us() -> Generator[None]:
    """Send what others print meanwhile, an experiment's own code and processes begun, to standard error."""
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
    peer_python: Annotated[
        Path | None, typer.Option(help="A Python that has flwr installed; its deployment engine is run for real.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1000, help="Simulated devices of the load rows.")] = 10_000,
    soak: Annotated[float, typer.Option(min=0.0, help="Seconds of steady load at the end; 0: none.")] = 0.0,
    json: JsonOption = False,
) -> None:
    """Rounds of no work, ten clients over HTTP; check-ins of ten thousand devices; a round of 300 of these."""
    from umbel.sim.bench.coordinator.bench import measure

    _bench(lambda: measure(quick=quick, peer_python=peer_python, n_devices=devices, soak_s=soak), json)


@bench_app.command("aggregate")
def bench_aggregate(quick: QuickOption = False, json: JsonOption = False) -> None:
    """The coordinator's memory while forty clients upload at once, and how fast updates are folded."""
    from umbel.sim.bench.aggregate import measure

    _bench(lambda: measure(quick=quick), json)


@bench_app.command("window")
def bench_window(
    quick: QuickOption = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) of it here.")] = None,
    json: JsonOption = False,
) -> None:
    """The self-tuned window against the static 130 % rule: useful client time on three simulated fleets."""
    from umbel.sim.bench.window.bench import measure

    _bench(lambda: measure(quick=quick, plot=plot), json)


@bench_app.command("codec")
def bench_codec(
    quick: QuickOption = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) of it here.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with MNIST's four files in mnist/: train with every codec, half an hour."),
    ] = None,
    curves: Annotated[Path | None, typer.Option(help="Write a picture (PNG) of that training here.")] = None,
    json: JsonOption = False,
) -> None:
    """What the integer codec loses, costs and takes: theory, EDEN, and a copy of memory beside it; and in training."""
    from umbel.sim.bench.codec.bench import measure

    if curves is not None and data is None:
        raise typer.BadParameter("--curves draws what --data is trained on; give both")
    _bench(lambda: measure(quick=quick, plot=plot, data=data, curves=curves), json)


@bench_app.command("simulate")
def bench_simulate(
    quick: QuickOption = False,
    only: Annotated[str | None, typer.Option(help="One part alone: A, B, C, Cs, M, start or cohorts.")] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            help="A Python that has flwr[simulation] or pfl: they train the same rounds, ten minutes or more."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where cohorts of all sizes are trained: cpu or cuda; by default a GPU, if any.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) of these cohorts here.")] = None,
    json: JsonOption = False,
) -> None:
    """Simulated rounds against a plain loop: small models, many clients, long tails, one large model, a million.

    With --peer-python also against Flower on Ray and pfl, whichever that interpreter has. On a GPU, or where --device
    says, cohorts of one client to a thousand are trained stacked, and one client after another.
    """
    from umbel.sim.bench.simulate.bench import NoSuchWorkload, measure
    from umbel.sim.engines.device import NoSuchDevice
    from umbel.sim.engines.work import EngineError

    _bench(
        lambda: measure(quick=quick, only=only, peer_python=peer_python, device=device, plot=plot),
        json,
        *(NoSuchWorkload, NoSuchDevice, EngineError),
    )


@bench_app.command("secagg")
def bench_secagg(
    quick: QuickOption = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) of it here.")] = None,
    json: JsonOption = False,
) -> None:
    """Secure aggregation: masks against their keystream, a client's round and the coordinator's, bytes; Flower's."""
    from umbel.sim.bench.secagg.bench import measure

    _bench(lambda: measure(quick=quick, plot=plot), json)
