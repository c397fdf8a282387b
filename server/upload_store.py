"""Updates on their way, as they are stored: how far each has come, and the chunks it consists of."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sqlalchemy import BindParameter, bindparam, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.types import AssignmentId
from umbel.server import tables
from umbel.server.database import Database
from umbel.server.stored import Chunk, StoredUpload
from umbel.server.tables import table_of

_UPLOAD, _CHUNK = table_of(tables.Upload), table_of(tables.UploadChunk)
_ASSIGNMENT, _ROUND = table_of(tables.Assignment), table_of(tables.Round)
_NAMES_MAX = 500  # in one statement: databases bound its parameters

# Built once: to build a statement takes as long as to run it.
_NAMES: BindParameter[str] = bindparam("names", expanding=True)
_NAME: BindParameter[str] = bindparam("name")
_UPLOADS = select(_UPLOAD).where(_UPLOAD.c.assignment.in_(_NAMES))
_CHUNKS = select(_CHUNK).where(_CHUNK.c.assignment.in_(_NAMES)).order_by(_CHUNK.c.assignment, _CHUNK.c.offset)
_LOCK = select(_ASSIGNMENT.c.id).where(_ASSIGNMENT.c.id.in_(_NAMES)).order_by(_ASSIGNMENT.c.id).with_for_update()
_LOCK_ONE = (
    select(_ASSIGNMENT.c.outcome, _ROUND.c.record.is_not(None).label("is_over"))
    .join(_ROUND, _ROUND.c.id == _ASSIGNMENT.c.round_id)
    .where(_ASSIGNMENT.c.id == _NAME)
    .with_for_update(of=_ASSIGNMENT)
)
_ADD_UPLOAD, _ADD_CHUNK = insert(_UPLOAD), insert(_CHUNK)
_MOVE_UPLOAD = (
    update(_UPLOAD).where(_UPLOAD.c.assignment == _NAME).values(offset=bindparam("to"), is_complete=bindparam("whole"))
)
_COUNT_BYTES = (
    update(_ASSIGNMENT).where(_ASSIGNMENT.c.id == _NAME).values(bytes_up=_ASSIGNMENT.c.bytes_up + bindparam("up"))
)


class UploadMoved(Exception):
    """Another request has changed this upload. `upload`: as it stands now, None if there is none."""

    def __init__(self, upload: StoredUpload | None) -> None:
        super().__init__("another request has changed this upload")
        self.upload = upload


class UploadOver(Exception):
    """The assignment's round takes no update any more, or its report stands on the one it has."""


class UploadStore:
    """The rows of uploads and their chunks. The rows of one upload are changed under the lock of its assignment's."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def look(self, assignment: AssignmentId) -> StoredUpload | None:
        async with self._db.reading() as tx:
            return (await uploads_of(tx, [assignment])).get(assignment)

    async def add_chunk(
        self, assignment: AssignmentId, known: StoredUpload | None, begun: StoredUpload, chunk: Chunk, is_last: bool
    ) -> tuple[StoredUpload, tuple[Chunk, ...]]:
        """Make a chunk that is in the blob store count, if the upload is still as `known`.

        `begun`: the upload that the chunk belongs to, `known` itself unless it begins anew. Returns the upload and the
        chunks that it consists of no more. Raises `UploadMoved`, `UploadOver`.
        """
        async with self._db.writing("add_chunk") as tx:
            stored = await _locked(tx, assignment)
            if stored != known:
                raise UploadMoved(stored)
            chunks = (*begun.chunks, chunk) if chunk.length else begun.chunks
            after = replace(begun, offset=begun.offset + chunk.length, is_complete=is_last, chunks=chunks)
            dropped = await self._save(tx, assignment, known, after, is_new=begun is not known)
            if chunk.length:
                row = {"assignment": assignment, "offset": begun.offset, "length": chunk.length, "key": chunk.key}
                await tx.execute(_ADD_CHUNK, row)
                await tx.execute(_COUNT_BYTES, {"name": assignment, "up": chunk.length})
        return after, dropped

    async def drop(self, assignment: AssignmentId, known: StoredUpload) -> tuple[Chunk, ...]:
        """Forget an upload that no report stands on; the chunks it consisted of. Raises `UploadMoved`, `UploadOver`."""
        async with self._db.writing("drop_upload") as tx:
            stored = await _locked(tx, assignment)
            if stored != known:
                raise UploadMoved(stored)
            return await self._drop(tx, assignment, known)

    async def chunks(self, assignments: Sequence[AssignmentId]) -> Mapping[AssignmentId, tuple[Chunk, ...]]:
        """The chunks of whole updates, in order."""
        async with self._db.reading() as tx:
            return {name: upload.chunks for name, upload in (await uploads_of(tx, assignments)).items()}

    async def _save(
        self,
        tx: AsyncConnection,
        assignment: AssignmentId,
        known: StoredUpload | None,
        after: StoredUpload,
        *,
        is_new: bool,
    ) -> tuple[Chunk, ...]:
        """Store how far an upload has come; the chunks of the one that a new one takes the place of."""
        if not is_new:
            counted = {"name": assignment, "to": after.offset, "whole": after.is_complete}
            await tx.execute(_MOVE_UPLOAD, counted)
            return ()
        dropped = () if known is None else await self._drop(tx, assignment, known)
        row = {
            "assignment": assignment,
            "length": after.length,
            "offset": after.offset,
            "sha256": after.sha256,
            "is_complete": after.is_complete,
        }
        await tx.execute(_ADD_UPLOAD, row)
        return dropped

    async def _drop(self, tx: AsyncConnection, assignment: AssignmentId, known: StoredUpload) -> tuple[Chunk, ...]:
        await tx.execute(delete(_CHUNK).where(_CHUNK.c.assignment == assignment))
        await tx.execute(delete(_UPLOAD).where(_UPLOAD.c.assignment == assignment))
        return known.chunks


async def _locked(tx: AsyncConnection, assignment: AssignmentId) -> StoredUpload | None:
    """An assignment's upload, which nobody else can change until the transaction ends.

    A report is saved under the lock of its assignment's row too, so an update that counts can no longer be changed.
    """
    row = (await tx.execute(_LOCK_ONE, {"name": assignment})).one_or_none()
    if row is None or row.outcome is not None or row.is_over:
        raise UploadOver
    return (await uploads_of(tx, [assignment])).get(assignment)


async def uploads_of(
    tx: AsyncConnection, assignments: Sequence[AssignmentId], for_update: bool = False
) -> dict[AssignmentId, StoredUpload]:
    """The uploads of these assignments, those that there are. `for_update`: lock the assignments first."""
    found: dict[AssignmentId, StoredUpload] = {}
    for first in range(0, len(assignments), _NAMES_MAX):
        names = sorted(assignments[first : first + _NAMES_MAX])
        if for_update:
            await tx.execute(_LOCK, {"names": names})
        uploads = (await tx.execute(_UPLOADS, {"names": names})).all()
        chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
        for row in await tx.execute(_CHUNKS, {"names": names}) if uploads else ():
            chunks[row.assignment].append(Chunk(row.key, row.length))
        for row in uploads:
            parts = tuple(chunks[row.assignment])
            upload = StoredUpload(row.length, row.offset, row.sha256, row.is_complete, parts)
            found[AssignmentId(row.assignment)] = upload
    return found
