"""What `run export-trace` does and prints: how runs went, as a file from which a simulation has clients like theirs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from pathlib import Path

import typer

from umbel.aggregation.canonical import canonical
from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.trace import Trace, trace_of
from umbel.client.cli.output import print_json
from umbel.client.cli.tables import moment
from umbel.client.files import write_atomically
from umbel.client.operator.operator import Operator
from umbel.client.printable import printable


@dataclass(frozen=True, slots=True)
class ExportedTrace:
    """A trace that was written to `file`, and what is in it.

    `attempts_ended`: of the runs, of which `attempts` show clients' times, and `committed` made a model. `first_at`,
    `last_at`: when the first of them opened and the last one closed, in Unix seconds. `reports`: of all clients;
    `with_train_s`, `with_upload_rate`: how many of them tell how long they trained, and how fast their update went.
    `with_absent`: attempts of which it is known who was not there; `secure`: those with masked updates.
    """

    file: str
    runs: tuple[str, ...]
    clients: int
    attempts: int
    attempts_ended: int
    committed: int
    first_at: float
    last_at: float
    reports: int
    with_train_s: int
    with_upload_rate: int
    with_absent: int
    secure: int


def export_trace(operator: Operator, runs: Sequence[str], out: Path, force: bool, as_json: bool) -> None:
    """Write the trace of these runs, of the same clients, to `out`. Raises `ValueError`, `ClientError`, `OSError`."""
    if len(set(runs)) < len(runs):
        raise ValueError("a run is named twice; its rounds would count twice")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} to; make it first")
    if out.exists() and not force:
        raise ValueError(f"{out} is there already; name another file, or say --force to write over it")
    tally = _Tally()
    trace = _trace_of(operator, runs, tally)
    write_atomically(out, canonical(trace).encode())
    facts = _facts(trace, out, runs, tally.ended)
    if as_json:
        print_json(facts)
    else:
        typer.echo("\n".join(_words(facts)))


@dataclass(slots=True)
class _Tally:
    """How many attempts have ended, as far as they were fetched."""

    ended: int = 0


def _trace_of(operator: Operator, runs: Sequence[str], tally: _Tally) -> Trace:
    ended = (_ended(operator, run, tally) for run in runs)
    try:
        return trace_of(merge(*ended, key=lambda record: record.opened_at + record.open_s))
    except ValueError as error:
        raise ValueError(f"{' and '.join(runs)}: {error}") from error


def _ended(operator: Operator, run: str, tally: _Tally) -> Iterator[RoundRecord]:
    """Every attempt of a run that has ended so far, a page at a time: not all of them need to fit into memory."""
    progress = operator.progress(run)
    while progress.ended:
        tally.ended += len(progress.ended)
        yield from progress.ended
        progress = operator.progress(run, progress.next_after)


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
    """What is in it, what is not known, and how to use it: a line each."""
    attempts = f"{counted(facts.attempts, 'attempt')} at rounds, {facts.committed} committed"
    yield f"{printable(facts.file)}: {counted(facts.clients, 'client')} in {attempts}"
    yield f"from {moment(facts.first_at)} to {moment(facts.last_at)}, with {counted(facts.reports, 'report')}"
    if left_out := facts.attempts_ended - facts.attempts:
        yield (
            f"left out: {counted(left_out, 'attempt')} that {agreeing(left_out, 'shows', 'show')} no times of training "
            "(evaluations, canaries, nobody was asked, or no coordinator was there for a while)"
        )
    yield from _unknown(facts)
    yield f'no names are in it. In an experiment for `umbel simulate`: [fleet] recorded = "{printable(facts.file)}"'


def _unknown(facts: ExportedTrace) -> Iterator[str]:
    if not facts.reports:
        yield "not known: how long clients take, for none has reported; a simulation cannot be made of that"
        return
    if without := facts.reports - facts.with_train_s:
        masked = ", whose updates were masked" if facts.secure else ""
        yield f"not known: how long clients trained, of {without} of {counted(facts.reports, 'report')}{masked}"
    if not facts.with_train_s:
        yield "so it can be asked what another window or target does, but not another codec or number of steps"
    elif without := facts.reports - facts.with_upload_rate:
        yield f"not known: how fast updates went up, of {without} of {counted(facts.reports, 'report')}"
    if without := facts.attempts - facts.with_absent:
        yield f"not known: who was not there to be asked, of {without} of {counted(facts.attempts, 'attempt')}"
