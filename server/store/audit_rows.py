"""The stored audit bundles, and the updates that are kept for a replay.

A bundle is added in the transaction of the event that it describes, under the lock of the run's row. So no bundle is
missing, and the chain never forks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.audit.bundle import Sealed, SignedReport
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.run_rows import by_client
from umbel.server.store.stored import ClientEvidence, StoredUpload
from umbel.server.store.tables import table_of
from umbel.server.store.uploads import uploads_of

_AUDIT, _ROUND = table_of(tables.AuditRow), table_of(tables.RoundRow)
_ASSIGNMENT, _CLIENT = table_of(tables.AssignmentRow), table_of(tables.ClientRow)
_UPLOAD, _CHUNK = table_of(tables.UploadRow), table_of(tables.UploadChunkRow)
_SIGNED = TypeAdapter(SignedReport)


@dataclass(frozen=True, slots=True)
class Expired:
    """A round whose kept updates are due to be deleted."""

    number: int  # of its bundle
    round_id: int


def signed_text(report: SignedReport) -> str:
    """A signed report in the form of its column."""
    return _SIGNED.dump_json(report).decode()


async def add_bundle(
    tx: AsyncConnection, run: RunId, number: int, sealed: Sealed, round_id: int | None, deleted_at: float | None
) -> None:
    """Store a bundle. `deleted_at`: when the updates that it names were deleted; None if they are kept."""
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
    """The evidence of each client of an open attempt."""
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


async def rounds_with_updates(tx: AsyncConnection, run: RunId, last_round: int) -> list[Expired]:
    """The rounds of a run up to `last_round` whose updates are kept."""
    query = (
        select(_AUDIT.c.number, _AUDIT.c.round_id)
        .join(_ROUND, _ROUND.c.id == _AUDIT.c.round_id)
        .where(_AUDIT.c.run == run, _AUDIT.c.updates_deleted_at.is_(None), _ROUND.c.number <= last_round)
        .order_by(_AUDIT.c.number)
    )
    return [Expired(row.number, row.round_id) for row in await tx.execute(query)]


async def mark_updates_deleted(tx: AsyncConnection, run: RunId, numbers: Sequence[int], now: float) -> None:
    """Record that the updates of these bundles were deleted."""
    mine = (_AUDIT.c.run == run, _AUDIT.c.number.in_(numbers))
    await tx.execute(update(_AUDIT).where(*mine).values(updates_deleted_at=now))


async def drop_updates(tx: AsyncConnection, which: ColumnElement[bool]) -> list[str]:
    """Delete the rows of the updates of these assignments; returns the keys of their blobs."""
    mine = select(_ASSIGNMENT.c.id).where(which)
    keys = list(await tx.scalars(select(_CHUNK.c.key).where(_CHUNK.c.assignment.in_(mine))))
    await tx.execute(delete(_CHUNK).where(_CHUNK.c.assignment.in_(mine)))
    await tx.execute(delete(_UPLOAD).where(_UPLOAD.c.assignment.in_(mine)))
    return keys


@dataclass(frozen=True, slots=True)
class StoredBundle:
    number: int
    round_id: int | None
    text: str
    sha256: str
    signature: str
    updates_deleted_at: float | None  # None: the updates that it names are kept


class AuditStore:
    """Reads bundles and kept updates."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def page(self, run: RunId, after: int, limit: int) -> Sequence[StoredBundle]:
        """A run's bundles from number `after` on, in order."""
        query = select(_AUDIT).where(_AUDIT.c.run == run, _AUDIT.c.number >= after)
        async with self._db.reading() as tx:
            rows = (await tx.execute(query.order_by(_AUDIT.c.number).limit(limit))).all()
        return [
            StoredBundle(row.number, row.round_id, row.bundle, row.sha256, row.signature, row.updates_deleted_at)
            for row in rows
        ]

    async def bundle(self, run: RunId, number: int) -> StoredBundle | None:
        return next((one for one in await self.page(run, number, 1) if one.number == number), None)

    async def update(self, round_id: int, client: ClientId) -> StoredUpload | None:
        """A client's update in an attempt; None if it is not kept."""
        query = select(_ASSIGNMENT.c.id).where(_ASSIGNMENT.c.round_id == round_id, _ASSIGNMENT.c.client == client)
        async with self._db.reading() as tx:
            name = await tx.scalar(query)
            if name is None:
                return None
            return (await uploads_of(tx, [AssignmentId(name)])).get(AssignmentId(name))
