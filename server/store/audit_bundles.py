"""Audit bundles as they are read: in pages, and the updates that they name."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.stored import StoredUpload
from umbel.server.store.tables import table_of
from umbel.server.store.uploads import uploads_of

_AUDIT, _ASSIGNMENT = table_of(tables.Audit), table_of(tables.Assignment)


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
