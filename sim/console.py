"""`umbel simulate` for people: its progress and its results."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.client.tensorboard import EventFolderRefused, TensorBoardMissing
from umbel.sim.engines.work import EngineError
from umbel.sim.experiment.checkpoint import CheckpointError
from umbel.sim.experiment.file import ATTEMPTS_MAX, Experiment, experiment_of, read_experiment, read_table, with_changes
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.federation.possible import SimulationError
from umbel.sim.results.results import CURVES_FILE, RECORDED_FILE, Results
from umbel.sim.results.shown import ShownTable, as_table, best_table, tables, with_band
from umbel.sim.simulation import simulate

EXPECTED: tuple[type[Exception], ...] = (
    ValueError,
    OSError,
    EngineError,
    SimulationError,
    CheckpointError,
    UpdateRefused,
    AccountantMissing,
    TensorBoardMissing,
    EventFolderRefused,
)

_HOPE = (
    "A longer window_s or a lower minimum in [rounds] may help. Devices in [fleet] that are faster, or present more "
    "often, may help too."
)
_TRIED = f"(Without rounds.attempts_max, a simulation tries a round {ATTEMPTS_MAX} times.)"
_PIPED_WIDTH = 120  # for a file


def run(
    file: Path | None,
    out: Path,
    data: Path | None,
    changes: Mapping[str, object],
    *,
    quiet: bool,
    native: bool = False,
    tensorboard: bool = False,
) -> Results:
    """Simulate the file's experiment, with progress on standard error and tables of results on standard output.

    `file`: None: the experiment of a Flower app that `changes` name. `native`: umbel takes the place of the app's
    strategy. `tensorboard`: as for `simulate`.
    """
    experiment = _experiment(file, changes, native=native)
    results = simulate(experiment, out, data, progress=not quiet, tensorboard=tensorboard)
    if quiet:
        return results
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    console.print(_table(as_table(results), results.name))
    if (best := best_table(results)) is not None:
        console.print(_table(best, f"the best of {' and '.join(results.best_over)}"))
    if any(point.groups for point in results.points):
        console.print(_group_table(results))
    for one in results.against:
        console.print(*tables(one), sep="\n")
    for note in (*results.leans, *results.declines, *results.notes, *results.engines):
        console.print(f"\n{note}", markup=False)
    for run in results.trials:
        if run.status is not RunStatus.FINISHED or _rounds_of(run) < run.trial.run.rounds.count:
            console.print(f"\n{run.trial.name} is {run.status.value}: {run.reason}", markup=False)
            if run.status is RunStatus.FAILED and run.trial.flower is None:
                console.print(_TRIED if "have declined" in run.reason else f"{_HOPE} {_TRIED}", markup=False)
    shown = " and ".join(str(out / name) for name in (CURVES_FILE, *([RECORDED_FILE] if results.against else [])))
    console.print(
        f"\n{shown} {'show' if results.against else 'shows'} the results; every round is in {out}/rounds.jsonl",
        markup=False,
    )
    return results


def _rounds_of(run: TrialResult) -> int:
    return sum(row.makes_model for row in run.rows)


def _experiment(file: Path | None, changes: Mapping[str, object], *, native: bool) -> Experiment:
    if file is not None and not native:
        return read_experiment(file, changes)
    if file is not None:
        table, base = read_table(file), file.parent
    elif (app := changes.get("flower.app")) is not None:
        from umbel.sim.flower.project import found_project

        name = re.sub("[^a-z0-9-]+", "-", found_project(Path(str(app))).name.lower()).strip("-")
        table, base = {"name": name or "app"}, Path()
    else:
        raise ValueError("there is nothing to simulate: name the file of an experiment, or a Flower app (--flower-app)")
    whole = with_changes(table, changes)
    if native:
        from umbel.sim.flower.native import native_experiment  # which needs Flower

        whole = native_experiment(whole, base)
    return experiment_of(whole, folder=base)


def changes_of(texts: Sequence[str]) -> dict[str, object]:
    """The values of `--set`. Raises `ValueError`."""
    return dict(map(_change, texts))


def flower_changes(app: Path | None, run_config: str | None) -> dict[str, object]:
    """The values of the flags of a Flower app. Raises `ValueError`."""
    from umbel.client.errors import AppError
    from umbel.client.flower.project import config_of, require_flower

    found: dict[str, object] = {} if app is None else {"flower.app": str(app.absolute())}
    if run_config is not None:
        try:
            require_flower()
            pairs = config_of(run_config, "--run-config")
        except AppError as error:
            raise ValueError(str(error)) from error
        found |= {f"flower.run_config.{key}": value for key, value in pairs.items()}
    return found


def _change(text: str) -> tuple[str, object]:
    """`rounds.count=5`: the value as in a TOML file, or else as text. Raises `ValueError`."""
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise ValueError(f"--set takes KEY=VALUE, such as rounds.count=5, not {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _table(shown: ShownTable, title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in shown.header:
        if name:
            table.add_column(escape(name), justify="right", no_wrap=True)
        else:
            table.add_column("", justify="left", min_width=16)
    for row in shown.rows:
        table.add_row(*map(escape, row))
    return table


def _group_table(results: Results) -> Table:
    """The last models' accuracy for each natural holder."""
    table = Table(title="accuracy of each", title_justify="left", box=None, pad_edge=False, header_style="bold")
    points = results.points
    names = dict.fromkeys(name for point in points for name in point.groups)
    if len(points) > 1:
        table.add_column("", justify="left", no_wrap=True)
    for name in names:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for point in points:
        cells = [with_band(point.groups.get(name), "{:.1%}") for name in names]
        table.add_row(*([escape(point.label)] if len(points) > 1 else []), *cells)
    return table
