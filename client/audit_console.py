"""What `run audit` and `run replay` do and print. What does not fit is one sentence and exit status 1."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from umbel.aggregation.audit import AuditFailed, RoundEnded, key_bytes
from umbel.aggregation.audit_chain import Auditor
from umbel.client import audit
from umbel.client.admin import Operator
from umbel.client.audit import Line
from umbel.client.errors import ClientError
from umbel.client.output import print_json
from umbel.client.printable import printable


@dataclass(frozen=True, slots=True)
class Audited:
    """What an audit has verified. `head`: the hash of the newest bundle."""

    run: str
    bundles: int
    head: str
    rounds: int
    reports_signed: int
    reports_unsigned: int
    keys: tuple[str, ...]


def audit_run(
    operator: Operator, run: str, out: Path | None, keys: Sequence[str], heads: Iterable[str], as_json: bool
) -> None:
    trusted = _trusted(operator, keys)
    with _told(run):
        auditor, lines = _verified(operator, run, trusted, heads)
    if out is not None:
        out.write_text("".join(f"{line.text}\n" for line in lines), encoding="utf-8")
    _tell(auditor, trusted, as_json)
    if not keys and not as_json:
        typer.echo(f"verified with the key that the coordinator itself tells, {trusted[0]}: pin it with --key")


def verify_file(file: Path, keys: Sequence[str], heads: Iterable[str], as_json: bool) -> None:
    """Verify bundles that were downloaded before."""
    with _told(str(file)):
        auditor, _ = audit.verify(audit.read_lines(file), [key_bytes(key) for key in keys])
        for head in heads:
            auditor.require_head(head)
    _tell(auditor, keys, as_json)


def replay_run(operator: Operator, run: str, number: int | None, keys: Sequence[str], heads: Iterable[str]) -> None:
    """Make a committed round again, or all (`number` None). Raises `typer.Exit` unless each comes out the same."""
    with _told(run):
        auditor, lines = _verified(operator, run, _trusted(operator, keys), heads)
        typer.echo(f"{len(lines)} bundles fit; the head is {auditor.head}")
        failed = [one for one in _wanted(auditor, number) if not _replayed(operator, run, auditor, lines, one)]
    if failed:
        raise typer.Exit(1)


def _wanted(auditor: Auditor, number: int | None) -> list[int]:
    if number is None and not auditor.rounds:
        raise AuditFailed("no round of it is committed yet, so there is nothing to make again")
    if number is not None and number not in auditor.rounds:
        raise AuditFailed(f"round {number} is not committed, so there is no model to make again")
    return sorted(auditor.rounds) if number is None else [number]


def _replayed(operator: Operator, run: str, auditor: Auditor, lines: Sequence[Line], number: int) -> bool:
    """Make a round again and tell of it; whether it came to the same hash."""
    from umbel.client.replay import Source, replay  # it imports torch, which an audit does without

    bundle, ended = auditor.rounds[number]
    assert auditor.created is not None, "the chain begins with the run's creation"
    if (why := _why_not(ended, lines[bundle], auditor)) is not None:
        typer.echo(f"round {number} cannot be made again: {printable(why)}", err=True)
        return False
    typer.echo(f"round {number}, from version {ended.model_in.version} of the model:")
    try:
        replay(Source(operator, run, bundle), ended, auditor.created, lambda said: typer.echo(f"  {said}"))
    except (AuditFailed, ClientError) as failed:
        typer.echo(f"umbel: round {number}: {printable(str(failed))}", err=True)
        return False
    return True


def _why_not(ended: RoundEnded, line: Line, auditor: Auditor) -> str | None:
    """Why the updates are not there any more; None if they should be."""
    if not ended.updates.kept:
        return f"its updates were {ended.updates.reason}"
    if line.updates_deleted_at is None:
        return None
    when = datetime.fromtimestamp(line.updates_deleted_at, UTC).isoformat(timespec="seconds")
    policy = auditor.created.run_file.get("retention", {}).get("updates") if auditor.created else None
    return f"its updates were deleted at {when} by the run's policy, retention.updates = {policy!r}"


def _verified(operator: Operator, run: str, trusted: Iterable[str], heads: Iterable[str]) -> tuple[Auditor, list[Line]]:
    view = operator.run(run)  # before the bundles: they may be more by then, not fewer
    auditor, lines = audit.verify(audit.download(operator, run), [key_bytes(key) for key in trusted])
    for head in (view.audit_head, *heads):
        auditor.require_head(head)
    return auditor, lines


def _trusted(operator: Operator, keys: Sequence[str]) -> list[str]:
    for key in keys:
        key_bytes(key)
    return list(keys) or [operator.audit_key()]


def _tell(auditor: Auditor, keys: Iterable[str], as_json: bool) -> None:
    n_signed, n_unsigned = auditor.n_reports_signed, auditor.n_reports_unsigned
    found = Audited(
        auditor.run, len(auditor.heads), auditor.head, len(auditor.rounds), n_signed, n_unsigned, tuple(keys)
    )
    if as_json:
        print_json(found)
        return
    unsigned = f", {found.reports_unsigned} without" if found.reports_unsigned else ""
    typer.echo(
        f"{printable(found.run)}: {found.bundles} bundles fit, {found.rounds} committed rounds, "
        f"{found.reports_signed} reports with their clients' signatures{unsigned}"
    )
    typer.echo(f"head {found.head}: note it, and give it back with --head to see that nothing was taken away since")


@contextmanager
def _told(run: str) -> Generator[None]:
    """What does not fit, in one sentence."""
    try:
        yield
    except AuditFailed as failed:
        typer.echo(f"umbel: the audit of {run} failed: {printable(str(failed))}", err=True)
        raise typer.Exit(1) from failed
