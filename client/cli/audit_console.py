"""What `run audit` and `run replay` do and print. What does not fit is one sentence and exit status 1."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded
from umbel.aggregation.audit.chain import Auditor
from umbel.aggregation.phrases import counted
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.aggregation.privacy.rounds import PrivacySpent
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import require_sha256
from umbel.client.cli.output import print_json
from umbel.client.errors import ClientError
from umbel.client.operator import audit
from umbel.client.operator.audit import AuditLine
from umbel.client.operator.operator import Operator
from umbel.client.printable import printable


@dataclass(frozen=True, slots=True)
class Audited:
    """What an audit has verified. `head`: the hash of the newest bundle.

    By what the bundles say that the coordinator has signed: `privacy`, what a private run has cost; `members_sha256`:
    of the member list that the run file binds the run to, empty without one.
    """

    run: str
    bundles: int
    head: str
    rounds: int
    reports_signed: int
    reports_unsigned: int
    keys: tuple[str, ...]
    privacy: PrivacySpent | None = None
    members_sha256: str = ""


def audit_run(
    operator: Operator, run: str, out: Path | None, keys: Sequence[str], heads: Iterable[str], as_json: bool
) -> None:
    trusted = _trusted(operator, keys)
    with _told(run):
        auditor, lines = _verified(operator, run, trusted, _noted(heads))
        found = _found(auditor, trusted)
    if out is not None:
        out.write_text("".join(f"{line.text}\n" for line in lines), encoding="utf-8")
    if as_json:
        print_json(found)
        return
    _tell(found, f"umbel run audit {run}")
    if not keys:
        typer.echo(
            f"careful: verified with the key that the coordinator itself tells, {trusted[0]}: compare it with what "
            "`umbel serve` has printed at its start, and pin it with --key"
        )
    if found.bundles == 1:
        typer.echo(f"so far there is only the run's creation: umbel run watch {run} tells when a round has ended")


def verify_file(file: Path, keys: Sequence[str], heads: Iterable[str], as_json: bool) -> None:
    """Verify bundles that were downloaded before."""
    if not file.is_file() or not file.stat().st_size:
        raise ValueError(f"there are no bundles in {file}; this writes them: umbel run audit NAME --out {file}")
    with _told(str(file)):
        auditor, _ = audit.verify(
            audit.read_lines(file), [public_key_bytes(key, f"--key {key[:60]!r}") for key in keys]
        )
        for head in _noted(heads):
            auditor.require_head(head)
        found = _found(auditor, keys)
    if as_json:
        print_json(found)
    else:
        _tell(found, f"umbel run verify {file}")


def replay_run(operator: Operator, run: str, number: int | None, keys: Sequence[str], heads: Iterable[str]) -> None:
    """Make a committed round again, or all (`number` None). Raises `typer.Exit` unless each comes out the same."""
    with _told(run):
        auditor, lines = _verified(operator, run, _trusted(operator, keys), _noted(heads))
        typer.echo(f"{counted(len(lines), 'bundle fits', 'bundles fit')}; the head is {auditor.head}")
        failed = [one for one in _wanted(auditor, number) if not _replayed(operator, run, auditor, lines, one)]
    if failed:
        raise typer.Exit(1)


def _wanted(auditor: Auditor, number: int | None) -> list[int]:
    show = f"umbel run show {auditor.run}"
    if number is None and not auditor.rounds:
        raise AuditFailed(
            f"no round of it is committed yet, so there is nothing to make again; {show} tells how it goes"
        )
    if number is not None and number not in auditor.rounds:
        raise AuditFailed(f"round {number} is not committed, so there is no model to make again; {show} lists those")
    return sorted(auditor.rounds) if number is None else [number]


def _replayed(operator: Operator, run: str, auditor: Auditor, lines: Sequence[AuditLine], number: int) -> bool:
    """Make a round again and tell of it; whether it came to the same hash."""
    from umbel.client.operator.replay import ReplaySource, replay  # it imports torch, which an audit does without

    bundle, ended = auditor.rounds[number]
    assert auditor.created is not None, "the chain begins with the run's creation"
    if (why := _why_not(ended, lines[bundle], auditor)) is not None:
        typer.echo(f"round {number} cannot be made again: {printable(why)}", err=True)
        return False
    typer.echo(f"round {number}, from version {ended.model_in.version} of the model:")
    try:
        replay(ReplaySource(operator, run, bundle), ended, auditor.created, lambda said: typer.echo(f"  {said}"))
    except (AuditFailed, ClientError) as failed:
        typer.echo(f"umbel: round {number}: {printable(str(failed))}", err=True)
        return False
    return True


def _why_not(ended: RoundEnded, line: AuditLine, auditor: Auditor) -> str | None:
    """Why the updates are not there any more; None if they should be."""
    if not ended.updates.kept:
        return f"its updates were {ended.updates.reason}"
    if line.updates_deleted_at is None:
        return None
    when = datetime.fromtimestamp(line.updates_deleted_at, UTC).isoformat(timespec="seconds")
    policy = auditor.created.run_file.get("retention", {}).get("updates") if auditor.created else None
    return f"its updates were deleted at {when} by the run's policy, retention.updates = {policy!r}"


def _verified(
    operator: Operator, run: str, trusted: Iterable[str], heads: Iterable[str]
) -> tuple[Auditor, list[AuditLine]]:
    view = operator.run(run)  # before the bundles: they may be more by then, not fewer
    auditor, lines = audit.verify(
        audit.download(operator, run), [public_key_bytes(key, "the audit key") for key in trusted]
    )
    for head in (view.audit_head, *heads):
        auditor.require_head(head)
    return auditor, lines


def _trusted(operator: Operator, keys: Sequence[str]) -> list[str]:
    for key in keys:
        public_key_bytes(key, f"--key {key[:60]!r}")
    return list(keys) or [operator.audit_key()]


def _noted(heads: Iterable[str]) -> list[str]:
    """The heads to insist on. Raises `ValueError` for a part of one: no bundle has it, which would look like a loss."""
    noted = list(heads)
    for head in noted:
        require_sha256(head, f"--head {head[:20]!r}: a bundle's hash, as `umbel run audit` prints it,")
    return noted


def _found(auditor: Auditor, keys: Iterable[str]) -> Audited:
    try:
        privacy = auditor.privacy()
    except AccountantMissing as error:
        typer.echo(f"umbel: what the run has cost in privacy cannot be reckoned here: {error}", err=True)
        privacy = None
    return Audited(
        auditor.run,
        len(auditor.heads),
        auditor.head,
        len(auditor.rounds),
        auditor.n_reports_signed,
        auditor.n_reports_unsigned,
        tuple(keys),
        privacy,
        auditor.members_sha256,
    )


def _tell(found: Audited, command: str) -> None:
    """What was verified, and the `command` that will verify it again."""
    unsigned = f", {found.reports_unsigned} without" if found.reports_unsigned else ""
    reports = counted(
        found.reports_signed, "report with its client's signature", "reports with their clients' signatures"
    )
    typer.echo(
        f"{printable(found.run)}: {counted(found.bundles, 'bundle fits', 'bundles fit')}, "
        f"{counted(found.rounds, 'committed round')}, {reports}{unsigned}"
    )
    if found.privacy is not None:
        typer.echo(f"privacy, by the plans that are signed: {found.privacy.words}")
    if found.members_sha256:
        typer.echo(f"member list, by the run file that is signed: {found.members_sha256}")
    typer.echo(f"head {found.head}: note it; this will tell whether anything was taken away since:")
    typer.echo(f"  {' '.join([command, *(f'--key {key}' for key in found.keys), f'--head {found.head}'])}")


@contextmanager
def _told(run: str) -> Generator[None]:
    """What does not fit, in one sentence."""
    try:
        yield
    except AuditFailed as failed:
        typer.echo(f"umbel: the audit of {run} failed: {printable(str(failed))}", err=True)
        raise typer.Exit(1) from failed
