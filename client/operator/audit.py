"""A run's audit bundles on an auditor's machine: download them, verify them, read a file with one bundle a line."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.audit.bundle import AuditFailed, Bundle, RoundEnded, RunCreated
from umbel.aggregation.audit.chain import Auditor
from umbel.aggregation.canonical import Json, canonical, parsed
from umbel.client.errors import CoordinatorMisbehaved, first_finding
from umbel.client.operator.operator import Operator

_BUNDLE = TypeAdapter(Bundle)
_FACTS: dict[object, TypeAdapter[Any]] = {"run": TypeAdapter(RunCreated), "round": TypeAdapter(RoundEnded)}


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One line of an audit file, and one entry of `GET /v1/admin/runs/{run}/audit`."""

    bundle: Json
    sha256: str
    signature: str
    updates_deleted_at: float | None  # not signed; None while the updates are kept

    @property
    def text(self) -> str:
        return canonical(self)


def download(operator: Operator, run: str) -> Iterator[AuditLine]:
    """Download a run's bundles, from its creation to the newest. Raises `CoordinatorMisbehaved` for malformed ones."""
    after = 0
    while True:
        try:
            page = parsed(operator.audit_page(run, after).decode())
            lines = [_line(one) for one in _list(_object(page).get("bundles"))]
        except ValueError as error:
            raise CoordinatorMisbehaved(f"the coordinator's list of audit bundles cannot be read: {error}") from error
        if not lines:
            return
        yield from lines
        after += len(lines)


def read_lines(path: Path) -> Iterator[AuditLine]:
    """Read the lines of an audit file. Raises `AuditFailed` for a malformed line, and `OSError`."""
    with path.open("rb") as file:
        for number, text in enumerate(file):
            try:
                yield _line(parsed(text.decode()))
            except ValueError as error:
                raise AuditFailed(f"bundle {number}: line {number + 1} of {path} is not a bundle: {error}") from error


def verify(lines: Iterable[AuditLine], keys: Collection[bytes]) -> tuple[Auditor, list[AuditLine]]:
    """Verify a chain from its first bundle on. Raises `AuditFailed` at the first bundle that fails."""
    auditor, taken = Auditor(keys, parse_bundle), list[AuditLine]()
    for line in lines:
        auditor.follow(line.bundle, line.sha256, line.signature)
        taken.append(line)
    if not taken:
        raise AuditFailed("the coordinator sent no bundle, but every run has at least the bundle of its creation")
    return auditor, taken


def parse_bundle(raw: Json) -> Bundle:
    """Parse a bundle. Raises `AuditFailed` for a malformed one, or one of an unknown kind."""
    bundle = _object(raw)
    kind = bundle.get("kind")
    facts = _FACTS.get(kind) if isinstance(kind, str) else None
    if facts is None:
        raise AuditFailed(
            f"this version of umbel does not know bundles of the kind {kind!r}; use the coordinator's version"
        )
    try:
        return _BUNDLE.validate_python({**bundle, "facts": facts.validate_python(bundle.get("facts"))})
    except ValidationError as error:
        raise AuditFailed(f"it is malformed: {first_finding(error, 'bundle')}") from error


def _line(value: Json) -> AuditLine:
    line = _object(value)
    sha256, signature, deleted_at = line.get("sha256"), line.get("signature"), line.get("updates_deleted_at")
    if not (isinstance(sha256, str) and isinstance(signature, str) and isinstance(deleted_at, int | float | None)):
        raise ValueError("its sha256, signature or updates_deleted_at is missing or malformed")
    return AuditLine(line.get("bundle"), sha256, signature, deleted_at)


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise ValueError("`bundles` is not a JSON array")
    return value
