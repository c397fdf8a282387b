"""An auditor's verbs: `umbel run audit`, `umbel run verify` and `umbel run replay`.

What does not verify is one sentence and exit status 1.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded
from umbel.aggregation.audit.chain import Auditor
from umbel.aggregation.phrases import counted
from umbel.aggregation.privacy.accounting import AccountantMissing
from umbel.aggregation.privacy.section import PrivacySpent
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import require_sha256
from umbel.client.cli.options import AsJson, RunName
from umbel.client.cli.output import print_json
from umbel.client.errors import ClientError, printable
from umbel.client.operator import audit
from umbel.client.operator.audit import AuditLine
from umbel.client.operator.operator import Operator

Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="The coordinator's public audit key, from a source that you trust; may be repeated. "
        "By default the key that the coordinator itself names.",
    ),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        metavar="SHA256",
        help="A head (a bundle's hash) that you noted earlier, and that must be in the chain; may be repeated.",
    ),
]


def _no_key() -> list[str]:
    raise typer.BadParameter(
        "no audit key: pass the coordinator's public audit key with --key KEY. The coordinator prints it when it "
        "starts (umbel serve), and umbel run audit NAME prints it, too"
    )


@dataclass(frozen=True, slots=True)
class Audited:
    run: str
    bundles: int
    head: str  # the hash of the newest bundle
    rounds: int
    reports_signed: int
    reports_unsigned: int
    keys: tuple[str, ...]
    privacy: PrivacySpent | None = None  # by the signed plans; None for a run without noise
    members_sha256: str = ""  # of the member list that the signed run file names; empty without one


def audit_run(
    operator: Operator,
    run: RunName,
    out: Annotated[Path | None, typer.Option("--out", help="Write the bundles to this file, one per line.")] = None,
    key: Keys = None,
    head: Heads = None,
    as_json: AsJson = False,
) -> None:
    """Download a run's audit bundles and verify their hashes, signatures and order, the chain of model
    versions, and the signatures of clients' reports."""
    trusted = _trusted(operator, key or ())
    with _failing_in_one_sentence(run):
        auditor, lines = _verified(operator, run, trusted, _whole_hashes(head or ()))
        found = _found(auditor, trusted)
    if out is not None:
        out.write_text("".join(f"{line.text}\n" for line in lines), encoding="utf-8")
    if as_json:
        print_json(found)
        return
    _print(found, f"umbel run audit {run}")
    if not key:
        typer.echo(
            f"careful: these bundles were verified with the key that the coordinator itself names, {trusted[0]}. "
            "Compare it with the key that `umbel serve` printed at its start. Next time, pass the key with --key"
        )
    if found.bundles == 1:
        typer.echo(
            f"so far there is only the bundle of the run's creation; umbel run watch {run} shows when a round ends"
        )


def verify_file(
    file: Annotated[Path, typer.Argument(help="The file that `umbel run audit --out` wrote.")],
    key: Annotated[
        list[str],
        typer.Option(
            "--key",
            metavar="KEY",
            default_factory=_no_key,
            show_default=False,
            help="The public audit key, required; may be repeated.",
        ),
    ],
    head: Heads = None,
    as_json: AsJson = False,
) -> None:
    """Verify a file of audit bundles without a coordinator."""
    if not file.is_file() or not file.stat().st_size:
        raise ValueError(f"there are no bundles in {file}; write them with umbel run audit NAME --out {file}")
    with _failing_in_one_sentence(str(file)):
        auditor, _ = audit.verify(audit.read_lines(file), _key_bytes(key))
        for noted in _whole_hashes(head or ()):
            auditor.require_head(noted)
        found = _found(auditor, key)
    if as_json:
        print_json(found)
    else:
        _print(found, f"umbel run verify {file}")


def replay_run(
    operator: Operator,
    run: RunName,
    round_: Annotated[int | None, typer.Option("--round", min=1, help="The round to compute again.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Compute every committed round again.")] = False,
    key: Keys = None,
    head: Heads = None,
) -> None:
    """Compute a round again from the stored updates. Exit status 0 only if the model hash is the same."""
    if (round_ is None) is not all_:
        raise typer.BadParameter(
            "name the rounds to compute again, either one or all: "
            f"umbel run replay {run} --round 1, or umbel run replay {run} --all"
        )
    with _failing_in_one_sentence(run):
        auditor, lines = _verified(operator, run, _trusted(operator, key or ()), _whole_hashes(head or ()))
        typer.echo(f"{counted(len(lines), 'bundle is verified', 'bundles are verified')}; the head is {auditor.head}")
        failed = [
            one for one in _rounds_to_replay(auditor, round_) if not _replay_one(operator, run, auditor, lines, one)
        ]
    if failed:
        raise typer.Exit(1)


def _rounds_to_replay(auditor: Auditor, number: int | None) -> list[int]:
    show = f"umbel run show {auditor.run}"
    if number is None and not auditor.rounds:
        raise AuditFailed(
            f"no round is committed yet, so there is nothing to compute again; {show} shows the run's progress"
        )
    if number is not None and number not in auditor.rounds:
        raise AuditFailed(
            f"round {number} is not committed, so it has no model to compute again; {show} lists committed rounds"
        )
    return sorted(auditor.rounds) if number is None else [number]


def _replay_one(operator: Operator, run: str, auditor: Auditor, lines: Sequence[AuditLine], number: int) -> bool:
    """Compute a round again and print the result; False unless the hash is the same."""
    from umbel.client.operator.replay import ReplaySource, replay  # it imports torch

    bundle, ended = auditor.rounds[number]
    assert auditor.created is not None, "the chain begins with the run's creation"
    if (why := _why_deleted(ended, lines[bundle], auditor)) is not None:
        typer.echo(f"round {number} cannot be computed again: {printable(why)}", err=True)
        return False
    typer.echo(f"round {number}, from version {ended.model_in.version} of the model:")
    try:
        replay(ReplaySource(operator, run, bundle), ended, auditor.created, lambda line: typer.echo(f"  {line}"))
    except (AuditFailed, ClientError) as failed:
        typer.echo(f"umbel: round {number}: {printable(str(failed))}", err=True)
        return False
    return True


def _why_deleted(ended: RoundEnded, line: AuditLine, auditor: Auditor) -> str | None:
    """Why the updates are deleted; None if the coordinator should have them."""
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
    view = operator.run(run)  # before the bundles: their number only grows
    auditor, lines = audit.verify(
        audit.download(operator, run), [public_key_bytes(key, "the audit key") for key in trusted]
    )
    for head in (view.audit_head, *heads):
        auditor.require_head(head)
    return auditor, lines


def _trusted(operator: Operator, keys: Sequence[str]) -> list[str]:
    _key_bytes(keys)  # raises for a malformed key
    return list(keys) or [operator.audit_key()]


def _key_bytes(keys: Iterable[str]) -> list[bytes]:
    return [public_key_bytes(key, f"--key {key[:60]!r}") for key in keys]


def _whole_hashes(heads: Iterable[str]) -> list[str]:
    """The heads that must be in the chain. Raises `ValueError` for a part of a hash, which no chain can have."""
    noted = list(heads)
    for head in noted:
        require_sha256(head, f"--head {head[:20]!r}: a bundle's hash, as `umbel run audit` prints it,")
    return noted


def _found(auditor: Auditor, keys: Iterable[str]) -> Audited:
    try:
        privacy = auditor.privacy()
    except AccountantMissing as error:
        typer.echo(f"umbel: the privacy cost of the run cannot be computed here: {error}", err=True)
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


def _print(found: Audited, command: str) -> None:
    """Print what was verified, and the `command` that verifies it again."""
    unsigned = f", {found.reports_unsigned} without" if found.reports_unsigned else ""
    reports = counted(
        found.reports_signed, "report with its client's signature", "reports with their clients' signatures"
    )
    typer.echo(
        f"{printable(found.run)}: {counted(found.bundles, 'bundle is verified', 'bundles are verified')}, "
        f"{counted(found.rounds, 'committed round')}, {reports}{unsigned}"
    )
    if found.privacy is not None:
        typer.echo(f"privacy cost by the signed plans: {found.privacy.words}")
    if found.members_sha256:
        typer.echo(f"member list, by the signed run file: {found.members_sha256}")
    typer.echo(f"head {found.head}: note it. Later, this command shows whether a bundle was removed:")
    typer.echo(f"  {' '.join([command, *(f'--key {key}' for key in found.keys), f'--head {found.head}'])}")


@contextmanager
def _failing_in_one_sentence(run: str) -> Generator[None]:
    """Turn a failed audit into one sentence and exit status 1."""
    try:
        yield
    except AuditFailed as failed:
        typer.echo(f"umbel: the audit of {run} failed: {printable(str(failed))}", err=True)
        raise typer.Exit(1) from failed
