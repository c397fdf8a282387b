"""A run's audit bundles, written in the transaction that they speak of: none is missing, and the chain never forks.

Whoever calls holds the lock of the run's row, in which the newest bundle's hash stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.audit.bundle import KeptUpdates, Sealed, SignedReport
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.run_end import RoundEnd
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.runs.audit_facts import ClientEvidence, Deposition, round_ended, run_created
from umbel.server.scribe import Scribe
from umbel.server.store import tables
from umbel.server.store.audit_key import AuditKey
from umbel.server.store.database import Database
from umbel.server.store.run_rows import by_client
from umbel.server.store.stored import LiveRun, StoredUpload
from umbel.server.store.tables import table_of
from umbel.server.store.uploads import uploads_of

_AUDIT, _ROUND, _LAYOUT = table_of(tables.AuditRow), table_of(tables.RoundRow), table_of(tables.LayoutRow)
_RUN = table_of(tables.RunRow)
_ASSIGNMENT, _CLIENT = table_of(tables.AssignmentRow), table_of(tables.ClientRow)
_UPLOAD, _CHUNK = table_of(tables.UploadRow), table_of(tables.UploadChunkRow)
_SIGNED = TypeAdapter(SignedReport)


@dataclass(frozen=True, slots=True)
class Head:
    """A run's newest bundle, and the blobs that nothing refers to any more since it was written."""

    number: int
    sha256: str
    keys: tuple[str, ...]


class AuditTrail:
    """Writes bundles, signed with this coordinator's key."""

    def __init__(self, key: AuditKey, scribe: Scribe) -> None:
        self._key = key
        self._scribe = scribe

    async def begin(self, tx: AsyncConnection, file: RunFile, model: ModelRef, master_sha256: str, now: float) -> None:
        """The first bundle of a run that was just stored."""
        layout = await tx.scalar(select(_LAYOUT.c.text).where(_LAYOUT.c.digest == model.layout_digest))
        assert layout is not None, "a model is stored with its layout"
        facts = run_created(file, model, master_sha256, layout, now)
        sealed = self._key.seal(file.name, 0, "", facts)
        await _store(tx, RunId(file.name), 0, sealed, None, None)
        hashes = {"run_file_sha256": facts.run_file_sha256, "audit_sha256": sealed.sha256}
        await tx.execute(update(_RUN).where(_RUN.c.name == file.name).values(hashes))

    async def end(self, tx: AsyncConnection, live: LiveRun, end: RoundEnd, deposition: Deposition) -> Head:
        """The bundle of an attempt that ends now, and the end of the updates that need not be kept for a replay.

        `live`: with the attempt's last state, and the model with which it began. `deposition`: of its clients; of their
        reports, the bundle is the only copy from now on.
        """
        ended_at = end.record.opened_at + end.record.wall_s
        updates, keys = await _give_up_updates(tx, live, end, ended_at)
        mine = (_ASSIGNMENT.c.round_id == live.round_id, _ASSIGNMENT.c.signed_report.is_not(None))
        await tx.execute(update(_ASSIGNMENT).where(*mine).values(signed_report=None))
        file_sha256 = (await tx.execute(select(_RUN.c.run_file_sha256).where(_RUN.c.name == live.name))).scalar_one()
        number = live.run.audit_number + 1
        sealed = await self._scribe.run(self._sealed, live, end, file_sha256, deposition, updates)
        await _store(tx, live.name, number, sealed, live.round_id, None if updates.kept else ended_at)
        return Head(number, sealed.sha256, keys)

    def _sealed(
        self, live: LiveRun, end: RoundEnd, file_sha256: str, deposition: Deposition, updates: KeptUpdates
    ) -> Sealed:
        facts = round_ended(live, end, file_sha256, deposition, updates)
        return self._key.seal(live.name, live.run.audit_number + 1, live.run.audit_sha256, facts)


def signed_text(report: SignedReport | None) -> str | None:
    """A signed report as its column holds it."""
    return None if report is None else _SIGNED.dump_json(report).decode()


async def _store(
    tx: AsyncConnection, run: RunId, number: int, sealed: Sealed, round_id: int | None, deleted_at: float | None
) -> None:
    row = {
        "run": run,
        "number": number,
        "round_id": round_id,
        "bundle": sealed.text,
        "sha256": sealed.sha256,
        "signature": sealed.signature,
        "updates_deleted_at": deleted_at,
    }
    await tx.execute(insert(_AUDIT).values(row))


async def evidence_of(tx: AsyncConnection, round_id: int) -> dict[ClientId, ClientEvidence]:
    """What is stored of each client of an attempt that has not ended."""
    query = (
        select(_ASSIGNMENT.c.client, _CLIENT.c.public_key, _ASSIGNMENT.c.signed_report)
        .join(_CLIENT, _CLIENT.c.id == _ASSIGNMENT.c.client)
        .where(_ASSIGNMENT.c.round_id == round_id)
    )
    found = dict[ClientId, ClientEvidence]()
    async for row in by_client(tx, query):
        report = None if row.signed_report is None else _SIGNED.validate_json(row.signed_report)
        found[ClientId(row.client)] = ClientEvidence(row.public_key, report)
    return found


async def _give_up_updates(
    tx: AsyncConnection, live: LiveRun, end: RoundEnd, now: float
) -> tuple[KeptUpdates, tuple[str, ...]]:
    """Delete the rows of updates that the run's policy does not keep; what it says, and the keys of their blobs."""
    policy = live.run.file.retention
    is_model = end.record.committed and end.record.task.makes_model
    keeps = is_model and policy.n_update_rounds != 0
    gone = _ASSIGNMENT.c.round_id == live.round_id
    keys = await _drop(tx, gone & _ASSIGNMENT.c.weight.is_(None) if keeps else gone)
    expired: list[tuple[int, int]] = []
    if is_model and policy.n_update_rounds:
        expired = await _expired(tx, live.name, end.record.round - policy.n_update_rounds)
        keys += await _drop(tx, _ASSIGNMENT.c.round_id.in_([round_id for _, round_id in expired]))
        numbers = [number for number, _ in expired]
        mine = (_AUDIT.c.run == live.name, _AUDIT.c.number.in_(numbers))
        await tx.execute(update(_AUDIT).where(*mine).values(updates_deleted_at=now))
    reason = _MASKED if live.plan.is_secure else _why(keeps, is_model, policy.updates)
    return KeptUpdates(keeps, tuple(number for number, _ in expired), reason), tuple(keys)


_MASKED = "masked, and deleted as soon as they were added up: of a secure round there is only the sum"


def _why(keeps: bool, is_model: bool, policy: str) -> str:
    if keeps:
        return f'kept for a replay: the run file says retention.updates = "{policy}"'
    if is_model:
        return f'deleted when the round had ended: the run file says retention.updates = "{policy}"'
    return "deleted when the attempt had ended: it made no model of them"


async def _expired(tx: AsyncConnection, run: RunId, last_round: int) -> list[tuple[int, int]]:
    """Bundles of rounds up to `last_round` whose updates are still kept: number and round id of each."""
    query = (
        select(_AUDIT.c.number, _AUDIT.c.round_id)
        .join(_ROUND, _ROUND.c.id == _AUDIT.c.round_id)
        .where(_AUDIT.c.run == run, _AUDIT.c.updates_deleted_at.is_(None), _ROUND.c.number <= last_round)
        .order_by(_AUDIT.c.number)
    )
    return [(row.number, row.round_id) for row in await tx.execute(query)]


async def _drop(tx: AsyncConnection, which: ColumnElement[bool]) -> list[str]:
    """Delete the rows of the updates of these assignments; the keys of their blobs."""
    mine = select(_ASSIGNMENT.c.id).where(which)
    keys = list(await tx.scalars(select(_CHUNK.c.key).where(_CHUNK.c.assignment.in_(mine))))
    await tx.execute(delete(_CHUNK).where(_CHUNK.c.assignment.in_(mine)))
    await tx.execute(delete(_UPLOAD).where(_UPLOAD.c.assignment.in_(mine)))
    return keys


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle, sealed. `updates_deleted_at`: since when the updates that it names are gone; None: they are kept."""

    number: int
    round_id: int | None
    text: str
    sha256: str
    signature: str
    updates_deleted_at: float | None


class AuditStore:
    """The read side; `AuditTrail` writes."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def page(self, run: RunId, after: int, limit: int) -> Sequence[StoredBundle]:
        """A run's bundles from the `after`-th on, in order."""
        query = select(_AUDIT).where(_AUDIT.c.run == run, _AUDIT.c.number >= after)
        async with self._db.reading() as tx:
            rows = (await tx.execute(query.order_by(_AUDIT.c.number).limit(limit))).all()
        return [
            StoredBundle(row.number, row.round_id, row.bundle, row.sha256, row.signature, row.updates_deleted_at)
            for row in rows
        ]

    async def bundle(self, run: RunId, number: int) -> StoredBundle | None:
        """One bundle."""
        return next((one for one in await self.page(run, number, 1) if one.number == number), None)

    async def update(self, round_id: int, client: ClientId) -> StoredUpload | None:
        """A client's update in an attempt, if it is kept."""
        query = select(_ASSIGNMENT.c.id).where(_ASSIGNMENT.c.round_id == round_id, _ASSIGNMENT.c.client == client)
        async with self._db.reading() as tx:
            name = await tx.scalar(query)
            if name is None:
                return None
            return (await uploads_of(tx, [AssignmentId(name)])).get(AssignmentId(name))
