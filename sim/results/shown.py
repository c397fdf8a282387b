"""What people see of an experiment: progress bars while it runs, then a table for the console or a notebook."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.round import Task
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.trials import Estimate, TrialResult, Watcher
from umbel.sim.federation.rows import Row
from umbel.sim.recorded.against_trace import AgainstTrace, Course
from umbel.sim.recorded.asked_again import FigureError
from umbel.sim.results.findings import BestOf, Findings, Point
from umbel.sim.results.notebook import NotebookCell


class Bars(Watcher):
    """A progress bar for the current run's rounds, and one for the runs, if there are several.

    `cell`: of a notebook, to show them in; None: on standard error.
    """

    def __init__(self, n_trials: int, cell: NotebookCell | None = None) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        self._progress = Progress(*columns, console=Console(stderr=True, force_jupyter=False))
        self._n_trials, self._cell = n_trials, cell
        self._all: TaskID | None = None
        self._one: TaskID | None = None

    def __enter__(self) -> "Bars":
        if self._cell is None:
            self._progress.start()
        if self._n_trials > 1:
            self._all = self._progress.add_task("runs", total=self._n_trials, status="")
        return self

    def __exit__(self, *_: object) -> None:
        self._shown(at_once=True)
        self._progress.stop()

    @classmethod
    def here(cls, n_trials: int) -> "Bars":
        """In the cell of a notebook, or on standard error."""
        return cls(n_trials, NotebookCell() if Console().is_jupyter else None)

    def _shown(self, *, at_once: bool = False) -> None:
        """Show in a notebook's cell what changed. A terminal is updated by itself."""
        if self._cell is not None:
            self._cell.show(self._progress.get_renderable(), at_once=at_once)

    def begins(self, trial: TrialSpec) -> None:
        if self._one is not None:
            self._progress.remove_task(self._one)
        total = trial.run.rounds.count if trial.flower is None else None  # the app will say
        self._one = self._progress.add_task(trial.name, total=total, status="")
        self._shown()

    def expects(self, trial: TrialSpec, n_rounds: int) -> None:
        if self._one is not None:
            self._progress.update(self._one, total=n_rounds)
            self._shown()

    def row(self, trial: TrialSpec, row: Row) -> None:
        if self._one is not None and Task(row.task).makes_model:
            self._note(self._one, row)
            self._shown()

    def _note(self, bar: TaskID, row: Row) -> None:
        if not row.committed:
            self._progress.update(bar, status=f"round {row.round}, attempt {row.attempt}: {row.reason}")
            return
        self._progress.update(bar, completed=row.round)
        if row.accuracy is not None:
            self._progress.update(bar, status=f"accuracy {row.accuracy:.1%}")
        elif row.loss is not None:
            self._progress.update(bar, status=f"loss {row.loss:.3g}")

    def ends(self, result: TrialResult) -> None:
        if self._one is not None and result.status is RunStatus.FINISHED:
            # Of a run that had ended before, no row was shown.
            last = max((row.round for row in result.rows if row.committed), default=0)
            self._progress.update(self._one, total=result.trial.run.rounds.count, completed=last)
        if self._all is not None:
            self._progress.advance(self._all)
        self._shown()


class Unit(NamedTuple):
    """`name`: in a picture; `sign`: after a number; `seconds`: how long it is."""

    name: str
    sign: str
    seconds: float


_UNITS = (
    Unit("seconds", "s", 1.0),
    Unit("minutes", "min", 60.0),
    Unit("hours", "h", 3600.0),
    Unit("days", "days", 86_400.0),
)
_UNITS_MIN = 2.0  # of a unit, before it is better than the smaller one


def unit_of(spans_s: Iterable[float]) -> Unit:
    """The unit for the longest of these; seconds without any."""
    longest = max(spans_s, default=0.0)
    return next((unit for unit in reversed(_UNITS) if longest >= _UNITS_MIN * unit.seconds), _UNITS[0])


def in_unit(span_s: float, unit: Unit) -> str:
    """With three digits: `4.75 s`, `12.3 min`, `311 h`."""
    number = span_s / unit.seconds
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{digits}f} {unit.sign}"


_WASTED_MIN = 0.005  # the table leaves out less
_HOUR_S = 3600.0


class ShownTable(NamedTuple):
    """`rows`: the cells of each point. The first column names the points if there are several."""

    header: list[str]
    rows: list[list[str]]


def as_table(results: Findings) -> ShownTable:
    """Each point's last accuracy and loss, and its costs."""
    points = results.points
    unit = unit_of(point.virtual_hours.mean * _HOUR_S for point in points if point.virtual_hours is not None)
    columns: list[tuple[str, Callable[[Point], str]]] = [
        ("accuracy", lambda point: with_band(point.accuracy, "{:.1%}")),
        *_if_any(points, "mean of groups", lambda point: point.groups_mean, "{:.1%}"),
        *_if_any(points, "worst group", lambda point: point.groups_worst, "{:.1%}"),
        *_if_any(points, "10 % of groups", lambda point: point.groups_p10, "{:.1%}"),
        ("loss", lambda point: mean_of(point.loss, "{:.3f}")),
        *_if_any(points, "train loss, all", lambda point: point.train_loss_all, "{:.3f}"),
        ("rounds", lambda point: mean_of(point.rounds, "{:.0f}")),
        ("MB up, down", lambda point: f"{_megabytes(point.bytes_up)}, {_megabytes(point.bytes_down)}"),
    ]
    if results.has_devices:
        columns += [
            ("partial", lambda point: mean_of(point.partial_share, "{:.0%}")),
            ("left out", lambda point: mean_of(point.left_out_share, "{:.0%}")),
            ("data in", lambda point: mean_of(point.samples_share, "{:.0%}")),
            ("virtual time", lambda point: _span(point.virtual_hours, unit)),
        ]
    if any(point.wasted_share is not None and point.wasted_share.mean >= _WASTED_MIN for point in points):
        columns.append(("wasted", lambda point: mean_of(point.wasted_share, "{:.0%}")))
    columns.append(("took", lambda point: mean_of(point.wall_s, "{:.1f} s")))
    if results.target_accuracy is not None:
        columns.append(
            (f"to {results.target_accuracy:.0%}", lambda point: mean_of(point.rounds_to_target, "{:.0f} rounds"))
        )
        smoothed = f"to {results.target_accuracy:.0%}, smoothed"
        columns += _if_any(points, smoothed, lambda point: point.smoothed_rounds_to_target, "{:.0f} rounds")
    if len(points) > 1:
        columns.insert(0, ("", lambda point: point.label))
    return ShownTable([name for name, _ in columns], [[cell(point) for _, cell in columns] for point in points])


def _value_of(name: str) -> Callable[[BestOf], str]:
    return lambda one: f"{one.values[name]}"


def best_table(results: Findings) -> ShownTable | None:
    """For each choice of the other swept keys, the best value of each key of `best_over`; None without such keys."""
    found = results.best_of
    if not found:
        return None
    columns: list[tuple[str, Callable[[BestOf], str]]] = [
        (f"best {name}", _value_of(name)) for name in results.best_over
    ]
    if results.target_accuracy is not None:
        to_target = f"rounds to {results.target_accuracy:.0%}"
        columns += [
            (to_target, lambda one: with_band(one.point.rounds_to_target, "{:.1f}")),
            ("seeds", lambda one: f"{one.point.reached_target} of {len(one.point.seeds)}"),
        ]
    columns.append(("best accuracy", lambda one: with_band(one.point.best_accuracy, "{:.2%}")))
    if len(found) > 1:
        columns.insert(0, ("", lambda one: one.label))
    return ShownTable([name for name, _ in columns], [[cell(one) for _, cell in columns] for one in found])


def _if_any(
    points: Sequence[Point], name: str, of: Callable[[Point], Estimate | None], form: str
) -> list[tuple[str, Callable[[Point], str]]]:
    """A column; none if no point has this figure."""
    return [(name, lambda point: mean_of(of(point), form))] if any(of(point) is not None for point in points) else []


def as_text(shown: ShownTable) -> str:
    """In columns, for a fixed-width font."""
    lines = [shown.header, *shown.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_padded(line, widths, is_named=not shown.header[0])).rstrip() for line in lines)


def with_band(estimate: Estimate | None, form: str) -> str:
    """The mean, and half the width of its confidence interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return mean_of(estimate, form)
    return f"{form.format(estimate.mean)} ± {form.format((estimate.high - estimate.low) / 2)}"


def figure(value: float, *, is_share: bool = False) -> str:
    """Three digits, or all of a whole number."""
    if is_share:
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def mean_of(estimate: Estimate | None, form: str) -> str:
    """A dash without an estimate, such as if no seed has reached the target."""
    return "-" if estimate is None else form.format(estimate.mean)


def _megabytes(estimate: Estimate | None) -> str:
    return "-" if estimate is None else figure(estimate.mean / 1e6)


def _span(hours: Estimate | None, unit: Unit) -> str:
    return "-" if hours is None else in_unit(hours.mean * _HOUR_S, unit)


def _padded(cells: Sequence[str], widths: Sequence[int], *, is_named: bool) -> list[str]:
    return [
        cell.ljust(width) if is_named and not place else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def tables(one: AgainstTrace) -> Iterator[RenderableType]:
    """Two tables, and how each point differs from the recorded run."""
    file = one.calibration.file
    if one.errors:
        yield Text(
            f"\n{file}: the recorded attempts, simulated with the fleet that is made from this trace", style="italic"
        )
        yield _errors(one.errors)
    else:
        yield Text(
            f"\n{file} does not say at how many reports its rounds close, because an older coordinator recorded it: "
            "the simulation error is unknown"
        )
    yield Text(
        "\ncompared with the recorded run; hours and MB are those of a committed round, with its abandoned attempts",
        style="italic",
    )
    yield _courses(one)
    yield Text("\n" + "\n".join(_words(one)))


def _words(one: AgainstTrace) -> Iterator[str]:
    """Differences from the recorded run, first those of all points."""
    all_unlike = {point.course.label: (*point.unlike, *point.work_unlike) for point in one.points}
    shared = [word for word in next(iter(all_unlike.values()), ()) if all(word in one for one in all_unlike.values())]
    if len(all_unlike) > 1 and shared:
        yield f"all points differ from the recorded run: {'; '.join(shared)}"
    for label, unlike in all_unlike.items():
        own = [word for word in unlike if len(all_unlike) == 1 or word not in shared]
        if own:
            yield f"{label} differs from the recorded run: {'; '.join(own)}"
        elif not unlike:
            yield f"{label} has the settings of the recorded run, so every difference is a simulation error"
    if one.calibration.is_secure:
        yield (
            "the recorded updates were masked, so only the total time of each client's work is known. The "
            "simulation keeps this time, even if bytes or steps differ from the record"
        )


def _errors(errors: Sequence[FigureError]) -> Table:
    table = _table("", "recorded", "simulated", "error")
    for error in errors:
        unit, factor = ("MB", 1e-6) if error.unit == "bytes" else (error.unit, 1.0)
        simulated, is_share = error.simulated, error.unit == "share"
        low, high = simulated.low, simulated.high
        band = "" if low is None or high is None else f" ± {figure((high - low) / 2 * factor, is_share=is_share)}"
        table.add_row(
            error.what if is_share else f"{error.what}, {unit}",
            figure(error.recorded * factor, is_share=is_share),
            f"{figure(simulated.mean * factor, is_share=is_share)}{band}",
            "-" if error.relative is None else f"{error.relative:+.1%}",
        )
    return table


def _courses(against: AgainstTrace) -> Table:
    table = _table("", "asked", "reported", "committed", "open s", "hours", "MB up", "down")
    rows: list[tuple[str, Course | None]] = [(one.label, one) for one in against.calibration.courses]
    for point in against.points:
        rows += [(point.course.label, point.course), ("  with the recorded work", point.recorded_work)]
    for label, one in rows:
        if one is None:
            continue
        table.add_row(
            escape(label),
            figure(one.asked),
            figure(one.reports),
            figure(one.committed, is_share=True),
            figure(one.open_s),
            *(
                _or_dash(value, unit)
                for value, unit in ((one.open_h, 1.0), (one.bytes_up, 1e-6), (one.bytes_down, 1e-6))
            ),
        )
    return table


def _or_dash(value: float | None, unit: float) -> str:
    """A dash where no round was committed."""
    return "-" if value is None else figure(value * unit)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    return table
