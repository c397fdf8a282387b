"""The operator's side of the HTTP API: tokens, clients, models, runs. For the command line and for scripts.

Every call is one try at each of the coordinator's addresses, until one answers. Only `follow` can keep trying.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from umbel.aggregation.audit.bundle import PublicAuditKey
from umbel.aggregation.run.records import RunProgress, RunView, VersionRecord
from umbel.aggregation.types import require_slug
from umbel.client.errors import CoordinatorMisbehaved, OutOfTime
from umbel.client.wire.addresses import addresses_in, warn_if_readable
from umbel.client.wire.timing import check_s
from umbel.client.wire.transport import (
    Body,
    FileBody,
    HttpAnswer,
    Patience,
    Transport,
    at_any_address,
    connect,
    patiently,
    sha256_of,
)

MODEL_BYTES_MAX = 1 << 40
PROGRESS_BYTES_MAX = 1 << 28  # every client of many rounds
AUDIT_BYTES_MAX = 1 << 30  # a page of bundles of the largest cohorts
CLIENTS_BYTES_MAX = 1 << 28
_PIECE_BYTES = 1 << 20
VERSIONS_PAGE = 1000
_AUDIT_KEY = TypeAdapter(PublicAuditKey)
_RUN = TypeAdapter(RunView)
_RUNS = TypeAdapter(list[RunView])
_PROGRESS = TypeAdapter(RunProgress)
_VERSIONS = TypeAdapter(list[VersionRecord])
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Tokens:
    tokens: list[str]


@dataclass(frozen=True, slots=True)
class EnrolledClient:
    """A client that has enrolled. Times are in Unix seconds."""

    id: str
    labels: Mapping[str, str]  # all labels
    bound_labels: Mapping[str, str]  # the labels from its token
    is_name_bound: bool  # whether its token had a name
    enrolled_at: float
    last_heard_at: float
    revoked_at: float | None  # when it was removed; None while it may take part


class Operator:
    """A coordinator as its operator sees it. Close it, or use it in a `with` statement."""

    def __init__(self, server: str, admin_key: str, transport: httpx.BaseTransport | None = None) -> None:
        bearer = {"Authorization": f"Bearer {admin_key}"}
        self._transport = Transport(connect(server, transport), lambda _target, _body_sha256: bearer)
        warn_if_readable(addresses_in(server), "the admin key and act with it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def _ask(self, method: str, path: str, **more: Any) -> HttpAnswer:
        return at_any_address(lambda: self._transport.ask(method, path, **more))

    def create_tokens(
        self,
        count: int = 1,
        ttl_s: float = 7 * 86400.0,
        *,
        client: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[str]:
        """One-time enrolment tokens. Repeating this makes more.

        `client`: the only name that the token can enrol; `labels`: facts about the clients.
        """
        order = {"count": count, "ttl_s": ttl_s, "client": client, "labels": dict(labels or {})}
        return self._ask("POST", "/v1/admin/tokens", **_json(order)).parse(TypeAdapter(_Tokens)).tokens

    def clients(self) -> list[EnrolledClient]:
        """All enrolled clients, also those that were removed."""
        answer = self._ask("GET", "/v1/admin/clients", bytes_max=CLIENTS_BYTES_MAX)
        return answer.parse(TypeAdapter(list[EnrolledClient]))

    def remove_client(self, client: str) -> None:
        """Refuse this client from now on."""
        require_slug(client, "client")
        self._ask("DELETE", f"/v1/admin/clients/{client}")

    def upload_model(self, model: bytes | Path) -> str:
        """Store a safetensors model, from memory or, piece by piece, from a file; returns its SHA-256."""
        if isinstance(model, bytes):
            return self._upload(model)
        with model.open("rb") as file:
            return self._upload(FileBody(file, 0, model.stat().st_size))

    def _upload(self, model: Body) -> str:
        sha256, headers = sha256_of(model).hex(), {"Content-Type": "application/octet-stream"}
        self._ask("PUT", f"/v1/admin/models/{sha256}", body=model, headers=headers, hold_s=check_s(len(model)))
        return sha256

    def create_run(
        self,
        name: str,
        run_file: str,
        model_sha256: str,
        members: str | None = None,
        *,
        same_first_model: bool = False,
    ) -> RunView:
        """Start a run from the text of a TOML run file and an uploaded model. The same again changes nothing.

        `members`: the text of the member list that the run file names. From then on only members take part, also in an
        existing run. `same_first_model`: allow a secure run to begin with a model that another secure run trains.
        """
        more: Mapping[str, Any] = {"body": run_file.encode(), "headers": {"Content-Type": "application/toml"}}
        if members is not None:
            more = _json({"run_file": run_file, "members": members})
        query = f"model={model_sha256}" + ("&same_first_model=true" if same_first_model else "")
        return self._ask("PUT", _run_path(name), query=query, **more).parse(_RUN)

    def runs(self) -> list[RunView]:
        return self._ask("GET", "/v1/admin/runs").parse(_RUNS)

    def run(self, name: str) -> RunView:
        return self._ask("GET", _run_path(name)).parse(_RUN)

    def progress(self, name: str, after: int = 0, wait_s: float = 0.0, mark: str = "") -> RunProgress:
        """The rounds that ended since `after`, and the one under way; held open for news for up to `wait_s` seconds.

        `mark`: the mark of the last answer; changes since then are news.
        """
        query = f"after={after}&wait_s={wait_s:g}" + (f"&mark={quote(mark, safe='')}" if mark else "")
        path = _run_path(name, "progress")
        return self._ask("GET", path, query=query, hold_s=wait_s, bytes_max=PROGRESS_BYTES_MAX).parse(_PROGRESS)

    def ended(self, name: str) -> Iterator[RunProgress]:
        """Every round so far, page by page. The last page has none."""
        progress = self.progress(name)
        yield progress
        while progress.ended:
            progress = self.progress(name, progress.next_after)
            yield progress

    def follow(self, name: str, wait_s: float, patience_s: float = 0.0) -> Iterator[RunProgress]:
        """News of a run, page by page, until the run has ended; each request is held open for up to `wait_s`.

        `patience_s`: how long to retry while a coordinator does not answer, as in a restart. Raises `OutOfTime` after
        that.
        """
        progress = self.progress(name)
        yield progress
        while progress.ended or not progress.run.status.is_over:
            ask = partial(self.progress, name, progress.next_after, wait_s, progress.mark)
            progress = _asking_again(ask, patience_s)
            yield progress

    def stop_run(self, name: str, reason: str) -> RunView:
        return self._order(name, "stop", reason=reason)

    def pause_run(self, name: str, reason: str, now: bool = False) -> RunView:
        """Begin no further round until the run is resumed. `now`: abandon the open round."""
        return self._order(name, "pause", reason=reason, now=now)

    def resume_run(self, name: str) -> RunView:
        return self._order(name, "resume")

    def start_round(self, name: str) -> RunView:
        """Begin the round with the clients that wait, without waiting for others."""
        return self._order(name, "start")

    def roll_back(self, name: str, to: int | Literal["best"], reason: str) -> RunView:
        """Continue from a copy of an older version, or of the best by the run file's `[stop]`."""
        return self._order(name, "rollback", to=to, reason=reason)

    def _order(self, name: str, verb: str, **order: object) -> RunView:
        return self._ask("POST", _run_path(name, verb), **_json(order)).parse(_RUN)

    def versions(self, name: str, first: int = 0, count: int | None = None) -> list[VersionRecord]:
        """A run's model versions from `first` on, also deleted ones: `count` of them, or all."""
        found, after, limit = list[VersionRecord](), first - 1, min(count or VERSIONS_PAGE, VERSIONS_PAGE)
        path = _run_path(name, "versions")
        while count is None or len(found) < count:
            page = self._ask("GET", path, query=f"after={after}&limit={limit}", bytes_max=PROGRESS_BYTES_MAX).parse(
                _VERSIONS
            )
            if not page:
                break
            found, after = [*found, *page], page[-1].version
        return found[:count]

    def download_model(self, sha256: str, path: Path | str) -> None:
        """Write a model to `path`, whole and checked, or not at all."""
        self._download(f"/v1/admin/models/{sha256}", Path(path), sha256)

    def download_master(self, name: str, version: VersionRecord, path: Path | str) -> None:
        """Write the full-precision copy of one of a run's model versions to `path`, checked; whole, or not at all."""
        self._download(_run_path(name, f"versions/{version.version}/master"), Path(path), version.master_sha256)

    def audit_key(self) -> str:
        """The key that the coordinator says it signs audit bundles with, base64. Anyone may ask."""
        return self._ask("GET", "/v1/audit-key").parse(_AUDIT_KEY).public_key

    def audit_page(self, name: str, after: int) -> bytes:
        """A page of a run's audit bundles, from number `after` on, as bytes; `audit.py` parses them."""
        return self._ask("GET", _run_path(name, "audit"), query=f"after={after}", bytes_max=AUDIT_BYTES_MAX).body

    def download_start(self, name: str, number: int, sha256: str, path: Path) -> None:
        """Write the full-precision model that an audited attempt began with to `path`, checked."""
        self._download(_run_path(name, f"audit/{number}/model"), path, sha256)

    def download_update(self, name: str, number: int, client: str, path: Path, bytes_max: int) -> str:
        """Write a client's stored update to `path`; returns its SHA-256."""
        require_slug(client, "client")
        with path.open("wb") as file:
            return self._write(_run_path(name, f"audit/{number}/updates/{client}"), file, bytes_max)

    def _download(self, address: str, path: Path, sha256: str) -> None:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to; make it first")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                if self._write(address, file, MODEL_BYTES_MAX) != sha256:
                    raise CoordinatorMisbehaved(f"the downloaded model does not have the SHA-256 {sha256[:12]}…")
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _write(self, address: str, file: IO[bytes], bytes_max: int) -> str:
        """Write the body of an answer to an open file; returns its SHA-256."""
        digest, n_bytes = hashlib.sha256(), 0
        with self._transport.stream("GET", address) as response:
            for piece in response.iter_raw(_PIECE_BYTES):
                n_bytes += len(piece)
                if n_bytes > bytes_max:
                    raise CoordinatorMisbehaved(f"the answer from {address} is longer than {bytes_max} bytes")
                digest.update(piece)
                file.write(piece)
        file.flush()
        return digest.hexdigest()


def _asking_again(step: Callable[[], T], patience_s: float) -> T:
    if patience_s <= 0:
        return step()
    try:
        return patiently(step, Patience(until=time.monotonic() + patience_s))
    except OutOfTime as error:
        raise OutOfTime(f"no answer after {patience_s:g} s of retries: {error.__cause__}") from error


def _run_path(name: str, what: str = "") -> str:
    """The path of a run, or of something under it. Raises `ValueError` for a malformed name."""
    require_slug(name, "name")
    return f"/v1/admin/runs/{name}/{what}".rstrip("/")


def _json(message: Mapping[str, object]) -> dict[str, Any]:
    body = TypeAdapter(dict[str, object]).dump_json(dict(message))
    return {"body": body, "headers": {"Content-Type": "application/json"}}
