"""`umbel simulate` as a person sees it: how far it is, and what it showed."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.aggregation.task import Task
from umbel.sim.engines.work import EngineError
from umbel.sim.experiments.against_tables import figure, tables
from umbel.sim.experiments.checkpoint import CheckpointError
from umbel.sim.experiments.estimate import Estimate
from umbel.sim.experiments.federation import SimulationError
from umbel.sim.experiments.file import Trial, read_experiment
from umbel.sim.experiments.results import Results
from umbel.sim.experiments.rows import Row
from umbel.sim.experiments.simulate import CURVES_FILE, RECORDED_FILE, Watcher, simulate
from umbel.sim.experiments.trials import TrialResult

EXPECTED: tuple[type[Exception], ...] = (
    ValueError,
    OSError,
    EngineError,
    SimulationError,
    CheckpointError,
    UpdateRefused,
    AccountantMissing,
)

_WASTED_MIN = 0.005  # of less, the table says nothing
_PIPED_WIDTH = 120  # in a file, no window makes it narrow


def run(file: Path, out: Path, data: Path | None, changes: Sequence[str], *, quiet: bool) -> Results:
    """Simulate the file's experiment, with bars on standard error, and a table of what it showed on standard output."""
    experiment = read_experiment(file, dict(map(_change, changes)))
    if quiet:
        return simulate(experiment, out, data)
    with _Bars(len(experiment.trials)) as bars:
        results = simulate(experiment, out, data, watcher=bars)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    console.print(_table(results))
    if any(point.groups for point in results.points):
        console.print(_group_table(results))
    for one in results.against:
        console.print(*tables(one), sep="\n")
    for run in results.trials:
        if run.status is not RunStatus.FINISHED or _rounds_of(run) < run.trial.run.rounds.count:
            console.print(f"\n{_name_of(run.trial)} is {run.status.value}: {run.reason}", markup=False)
    shown = " and ".join(str(out / name) for name in (CURVES_FILE, *([RECORDED_FILE] if results.against else [])))
    console.print(
        f"\n{shown} {'show' if results.against else 'shows'} it; every round is in {out}/rounds.jsonl", markup=False
    )
    return results


def _name_of(trial: Trial) -> str:
    return ", ".join(filter(None, (trial.label, f"seed {trial.seed}")))


def _rounds_of(run: TrialResult) -> int:
    return sum(row.makes_model for row in run.rows)


def _change(text: str) -> tuple[str, object]:
    """`rounds.count=5`: the value as in a TOML file, or as it is. Raises `ValueError`."""
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise ValueError(f"--set takes KEY=VALUE, such as rounds.count=5, not {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


class _Bars(Watcher):
    """A bar for the rounds of the run at hand, and one for the runs, if there are several."""

    def __init__(self, n_trials: int) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}", markup=False),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._n_trials = n_trials
        self._all: TaskID | None = None
        self._one: TaskID | None = None

    def __enter__(self) -> "_Bars":
        self._progress.start()
        if self._n_trials > 1:
            self._all = self._progress.add_task("runs", total=self._n_trials, told="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begins(self, trial: Trial) -> None:
        if self._one is not None:
            self._progress.remove_task(self._one)
        self._one = self._progress.add_task(_name_of(trial), total=trial.run.rounds.count, told="")

    def row(self, trial: Trial, row: Row) -> None:
        if self._one is None or not Task(row.task).makes_model:
            return
        if not row.committed:
            self._progress.update(self._one, told=f"round {row.round}, attempt {row.attempt}: {row.reason}")
            return
        self._progress.update(self._one, completed=row.round)
        if row.accuracy is not None:
            self._progress.update(self._one, told=f"accuracy {row.accuracy:.1%}")

    def ends(self, result: TrialResult) -> None:
        if self._all is not None:
            self._progress.advance(self._all)


def _table(results: Results) -> Table:
    table = Table(title=escape(results.name), title_justify="left", box=None, pad_edge=False, header_style="bold")
    points = results.points
    if len(points) > 1:
        table.add_column("", justify="left", min_width=16)
    table.add_column("accuracy", justify="right", no_wrap=True)
    is_wasted = any(point.wasted_share is not None and point.wasted_share.mean >= _WASTED_MIN for point in points)
    for name in ("loss", "rounds", "MB up, down", "hours", *(["wasted"] if is_wasted else []), "took"):
        table.add_column(name, justify="right", no_wrap=True)
    if results.target_accuracy is not None:
        table.add_column(f"to {results.target_accuracy:.0%}", justify="right", no_wrap=True)
    for point in points:
        cells = [
            _with_band(point.accuracy, "{:.1%}"),
            _mean(point.loss, "{:.3f}"),
            _mean(point.rounds, "{:.0f}"),
            f"{_megabytes(point.bytes_up)}, {_megabytes(point.bytes_down)}",
            _mean(point.virtual_hours, "{:.2f}"),
            *([_mean(point.wasted_share, "{:.0%}")] if is_wasted else []),
            _mean(point.wall_s, "{:.1f} s"),
        ]
        if results.target_accuracy is not None:
            cells.append(_mean(point.rounds_to_target, "{:.0f} rounds"))
        table.add_row(*([escape(point.label)] if len(points) > 1 else []), *cells)
    return table


def _group_table(results: Results) -> Table:
    """The last models' accuracy for each holder of data by nature."""
    table = Table(title="accuracy of each", title_justify="left", box=None, pad_edge=False, header_style="bold")
    points = results.points
    names = dict.fromkeys(name for point in points for name in point.groups)
    if len(points) > 1:
        table.add_column("", justify="left", no_wrap=True)
    for name in names:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for point in points:
        cells = [_with_band(point.groups.get(name), "{:.1%}") for name in names]
        table.add_row(*([escape(point.label)] if len(points) > 1 else []), *cells)
    return table


def _with_band(estimate: Estimate | None, form: str) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return _mean(estimate, form)
    return f"{form.format(estimate.mean)} ± {form.format((estimate.high - estimate.low) / 2)}"


def _megabytes(estimate: Estimate | None) -> str:
    return "-" if estimate is None else figure(estimate.mean / 1e6)


def _mean(estimate: Estimate | None, form: str) -> str:
    """A dash where there is none, as where no seed has reached the target."""
    return "-" if estimate is None else form.format(estimate.mean)
