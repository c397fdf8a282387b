"""`umbel run export-trace`: write how the rounds of runs went, so that a simulation can have clients like theirs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import Annotated

import typer

from umbel.aggregation.canonical import canonical
from umbel.aggregation.phrases import counted
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.trace import Trace, trace_of
from umbel.client.cli.options import AsJson
from umbel.client.cli.output import moment, print_result
from umbel.client.errors import printable
from umbel.client.files import write_atomically
from umbel.client.operator.operator import Operator


@dataclass(frozen=True, slots=True)
class ExportedTrace:
    """A trace that was written to a file, and what it contains. Times are in Unix seconds."""

    file: str
    runs: tuple[str, ...]
    clients: int
    attempts: int  # in the trace: those with times of training
    attempts_ended: int  # of the runs in all
    committed: int  # attempts in the trace that made a model
    first_at: float  # when the first attempt opened
    last_at: float  # when the last attempt closed
    reports: int
    with_train_s: int  # reports with a training time
    with_upload_rate: int
    with_absent: int  # attempts whose absent clients are known
    secure: int  # attempts with masked updates


def export_trace(
    operator: Operator,
    runs: Annotated[list[str], typer.Argument(metavar="NAME", help="One or more runs with the same clients.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write the trace, in JSON.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a trace: how the rounds of runs went, without names. `umbel simulate` can then simulate such clients
    (docs/reference/traces.md). If a run is still running, the trace has the rounds that have ended."""
    if len(set(runs)) < len(runs):
        raise ValueError("a run is named twice, so its rounds would count twice; name each run once")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} to; make it first")
    if out.exists() and not force:
        raise ValueError(f"{out} exists already; name another file, or pass --force to overwrite it")
    n_ended = Counter[str]()
    trace = _trace_of(operator, runs, n_ended)
    write_atomically(out, canonical(trace).encode())
    facts = _facts(trace, out, runs, n_ended.total())
    print_result(facts, "\n".join(_words(facts)), as_json)


def _trace_of(operator: Operator, runs: Sequence[str], n_ended: Counter[str]) -> Trace:
    """`n_ended`: gets the number of attempts that were fetched, by run."""
    ended = (_ended(operator, run, n_ended) for run in runs)
    try:
        return trace_of(merge(*ended, key=lambda record: record.opened_at + record.open_s))
    except ValueError as error:
        raise ValueError(f"{' and '.join(runs)}: {error}") from error


def _ended(operator: Operator, run: str, n_ended: Counter[str]) -> Iterator[RoundRecord]:
    """Yield every ended attempt of a run. Memory holds one page."""
    for page in operator.ended(run):
        n_ended[run] += len(page.ended)
        yield from page.ended


def _facts(trace: Trace, out: Path, runs: Sequence[str], n_ended: int) -> ExportedTrace:
    attempts = trace.attempts
    reports = [one for attempt in attempts for one in attempt.clients if one.report_s is not None]
    return ExportedTrace(
        file=str(out),
        runs=tuple(runs),
        clients=trace.clients,
        attempts=len(attempts),
        attempts_ended=n_ended,
        committed=sum(attempt.committed for attempt in attempts),
        first_at=min(attempt.opened_at for attempt in attempts),
        last_at=max(attempt.opened_at + attempt.open_s for attempt in attempts),
        reports=len(reports),
        with_train_s=sum(one.train_s is not None for one in reports),
        with_upload_rate=sum(one.upload_bytes_per_s is not None for one in reports),
        with_absent=sum(attempt.absent is not None for attempt in attempts),
        secure=sum(attempt.secure for attempt in attempts),
    )


def _words(facts: ExportedTrace) -> Iterator[str]:
    """What the trace contains, what is unknown, and how to use it: one line each."""
    attempts = f"{counted(facts.attempts, 'attempt')} at rounds, {facts.committed} committed"
    yield f"{printable(facts.file)}: {counted(facts.clients, 'client')} in {attempts}"
    yield f"from {moment(facts.first_at)} to {moment(facts.last_at)}, with {counted(facts.reports, 'report')}"
    if left_out := facts.attempts_ended - facts.attempts:
        yield (
            f"left out: {counted(left_out, 'attempt')} without training times "
            "(evaluations, canaries, rounds without clients, or time in which no coordinator ran)"
        )
    yield from _unknown(facts)
    yield (
        "the trace holds no names. To use it, write in an experiment file: "
        f'[fleet] recorded = "{printable(facts.file)}"'
    )


def _unknown(facts: ExportedTrace) -> Iterator[str]:
    if not facts.reports:
        yield "unknown: how long clients take, because none has reported; this trace cannot be simulated"
        return
    if without := facts.reports - facts.with_train_s:
        masked = ", whose updates were masked" if facts.secure else ""
        yield f"unknown: how long clients trained, in {without} of {counted(facts.reports, 'report')}{masked}"
    if not facts.with_train_s:
        yield "so a simulation can try another window or target, but not another codec or number of steps"
    elif without := facts.reports - facts.with_upload_rate:
        yield f"unknown: how fast updates were uploaded, in {without} of {counted(facts.reports, 'report')}"
    if without := facts.attempts - facts.with_absent:
        yield f"unknown: which clients were absent, in {without} of {counted(facts.attempts, 'attempt')}"
