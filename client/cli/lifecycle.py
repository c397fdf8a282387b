"""What the command line does with a run that is there: pause, resume, stop, roll back; versions, and one as a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer
from rich.text import Text

import umbel
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.phrases import part_of
from umbel.aggregation.run.records import VersionRecord
from umbel.client.cli.output import print_json, screen, tell_run
from umbel.client.cli.tables import Column, moment, table_lines
from umbel.client.cli.view_rounds import measured
from umbel.client.operator.operator import Operator
from umbel.client.printable import printable


@dataclass(frozen=True, slots=True)
class Exported:
    """A model version that was written to `file`. `round`: the one that made it, None for version 0 and rollbacks."""

    file: str
    run: str
    version: int
    round: int | None
    sha256: str
    size_bytes: int
    umbel: str


def stop_run(operator: Operator, run: str, reason: str, yes: bool, as_json: bool) -> None:
    view = operator.run(run)
    if not (view.status.is_over or yes):
        done = f"{part_of(view.rounds_done, view.rounds_planned, 'round', 'is', 'are')} done"
        typer.confirm(f"Stop {run} for good, where {done}? `umbel run pause` can be undone", abort=True, err=True)
    if view.status.is_over and not as_json:
        typer.echo(f"{run} is over already, nothing was stopped", err=True)
    tell_run(view if view.status.is_over else operator.stop_run(run, reason), as_json)


def pause_run(operator: Operator, run: str, reason: str, now: bool, as_json: bool) -> None:
    if operator.run(run).status is RunStatus.PAUSED and not now and not as_json:
        typer.echo(f"{run} is paused already", err=True)
    tell_run(operator.pause_run(run, reason, now), as_json)


def resume_run(operator: Operator, run: str, as_json: bool) -> None:
    if operator.run(run).status is RunStatus.RUNNING and not as_json:
        typer.echo(f"{run} is not paused", err=True)
    tell_run(operator.resume_run(run), as_json)


def roll_back(operator: Operator, run: str, to: str, reason: str, as_json: bool) -> None:
    before, after = operator.run(run), operator.roll_back(run, _version_or_best(to), reason)
    if after.model.version == before.model.version and not as_json:
        typer.echo(f"{run} stands on this model already, nothing was changed", err=True)
    tell_run(after, as_json)


def list_versions(operator: Operator, run: str, as_json: bool) -> None:
    versions = operator.versions(run)
    if as_json:
        print_json(versions)
        return
    columns = [
        _column("version", 100, [str(one.version) for one in versions]),
        _column("sha256", 60, [printable(one.sha256[:12]) for one in versions]),
        _column("MB", 30, [f"{one.size_bytes / 1e6:.2f}" for one in versions]),
        _column("from", 80, [_origin(one) for one in versions]),
        _column("samples", 40, [str(one.sample_count) for one in versions]),
        *measured("training", 50, [one.metrics for one in versions]),
        *measured("held-out", 70, [one.evaluation for one in versions]),
        _column("made", 20, [moment(one.created_at) for one in versions]),
        _column("state", 90, [_state(one) for one in versions]),
    ]
    console = screen()
    console.print(Text("\n").join(table_lines(columns, console.width)))


def export_model(
    operator: Operator, run: str, version: int | None, out: Path, as_json: bool, *, full_precision: bool = False
) -> None:
    newest = operator.run(run).model.version
    found = _kept(operator.versions(run, first=newest if version is None else version, count=1), run, version, newest)
    sha256 = found.master_sha256 if full_precision else found.sha256
    if full_precision:
        operator.download_master(run, found, out)
    else:
        operator.download_model(sha256, out)
    n_bytes = out.stat().st_size
    facts = Exported(str(out), run, found.version, found.round, sha256, n_bytes, umbel.__version__)
    if as_json:
        print_json(facts)
    else:
        what = ", in full precision" if full_precision else ""
        typer.echo(f"{out}: version {found.version} ({_origin(found)}){what}, sha256 {printable(sha256)}")


def _kept(found: Sequence[VersionRecord], run: str, version: int | None, newest: int) -> VersionRecord:
    if not found or (version is not None and found[0].version != version):
        raise ValueError(f"run {run} has no version {version}, only 0 to {newest}")
    if found[0].deleted_at is not None:
        raise ValueError(f"version {version} was deleted; `umbel run versions {run}` tells which are kept")
    return found[0]


def _version_or_best(to: str) -> int | Literal["best"]:
    if to == "best":
        return "best"
    if not (to.isascii() and to.isdigit() and len(to) < 16):
        raise ValueError(f"--to must be a version's number, or best, not {to!r}")
    return int(to)


def _origin(version: VersionRecord) -> str:
    if version.rolled_back_to is not None:
        return f"rollback to {version.rolled_back_to}"
    return "the start" if version.round is None else f"round {version.round}"


def _state(version: VersionRecord) -> str:
    best = ["best"] if version.is_best else []
    return ", ".join(best + ([] if version.deleted_at is None else [f"deleted {moment(version.deleted_at)}"]))


def _column(head: str, worth: int, cells: Sequence[str]) -> Column:
    return Column(head, [Text(cell) for cell in cells], worth)
