"""Tables of `umbel simulate` for a fleet that is made of a trace: the simulation error, and points beside it."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from umbel.sim.recorded.against_trace import AgainstTrace
from umbel.sim.recorded.asked_again import FigureError
from umbel.sim.recorded.courses import Course
from umbel.sim.results.shown import figure


def tables(one: AgainstTrace) -> Iterator[RenderableType]:
    """Two tables, and how each point differs from the recorded run."""
    file = one.calibration.file
    if one.errors:
        yield Text(f"\n{file}: recorded attempts, asked again of the fleet that is made of them", style="italic")
        yield _errors(one.errors)
    else:
        yield Text(
            f"\n{file} does not say at how many reports its rounds were to close, for an older coordinator has "
            "recorded them: the simulation error is unknown"
        )
    yield Text("\nbeside the record; hours and MB of a committed round", style="italic")
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
            yield f"{label} asks what was recorded, so every difference is a simulation error"
    if one.calibration.is_secure:
        yield (
            "the recorded updates were masked, so only the total time of the work is known: other bytes or steps do "
            "not change it here"
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
    table = _table("", "asked", "in", "committed", "open s", "hours", "MB up", "down")
    rows: list[tuple[str, Course | None]] = [(one.label, one) for one in against.calibration.courses]
    for point in against.points:
        rows += [(point.course.label, point.course), ("  with the recorded work", point.recorded_work)]
    for label, one in rows:
        if one is None:
            continue
        table.add_row(
            label,
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
