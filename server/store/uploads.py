"""The stored uploads of updates: how many bytes each has, and its chunks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sqlalchemy import BindParameter, Executable, bindparam, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.types import AssignmentId
from umbel.server.store import tables
from umbel.server.store.batches import Batches
from umbel.server.store.database import Database
from umbel.server.store.stored import Chunk, StoredUpload
from umbel.server.store.tables import table_of

_UPLOAD, _CHUNK = table_of(tables.UploadRow), table_of(tables.UploadChunkRow)
_ASSIGNMENT, _ROUND = table_of(tables.AssignmentRow), table_of(tables.RoundRow)
_NAMES_MAX = 500  # in one statement: databases limit its parameters

# Built once, because building a statement takes as long as running it.
_NAMES: BindParameter[str] = bindparam("names", expanding=True)
_NAME: BindParameter[str] = bindparam("name")
_UPLOADS = select(_UPLOAD).where(_UPLOAD.c.assignment.in_(_NAMES))
_CHUNKS = select(_CHUNK).where(_CHUNK.c.assignment.in_(_NAMES)).order_by(_CHUNK.c.assignment, _CHUNK.c.offset)
_LOCK = select(_ASSIGNMENT.c.id).where(_ASSIGNMENT.c.id.in_(_NAMES)).order_by(_ASSIGNMENT.c.id).with_for_update()
_IS_OVER = or_(_ROUND.c.record.is_not(None), _ASSIGNMENT.c.outcome.is_not(None)).label("is_over")
_TAKING = (
    select(_ASSIGNMENT.c.id, _IS_OVER)
    .join(_ROUND, _ROUND.c.id == _ASSIGNMENT.c.round_id)
    .where(_ASSIGNMENT.c.id.in_(_NAMES))
)
_LOCK_FREE = _TAKING.with_for_update(of=_ASSIGNMENT, skip_locked=True)
_LOCK_WAITING = _TAKING.with_for_update(of=_ASSIGNMENT)
_DROP_CHUNKS = delete(_CHUNK).where(_CHUNK.c.assignment.in_(_NAMES))
_DROP_UPLOADS = delete(_UPLOAD).where(_UPLOAD.c.assignment.in_(_NAMES))
_ADD_UPLOAD, _ADD_CHUNK = insert(_UPLOAD), insert(_CHUNK)
_MOVE_UPLOAD = (
    update(_UPLOAD).where(_UPLOAD.c.assignment == _NAME).values(offset=bindparam("to"), is_complete=bindparam("whole"))
)
_COUNT_BYTES = (
    update(_ASSIGNMENT).where(_ASSIGNMENT.c.id == _NAME).values(bytes_up=_ASSIGNMENT.c.bytes_up + bindparam("up"))
)

_Added: TypeAlias = StoredUpload | None


class UploadMoved(Exception):
    """Another request has changed this upload. `upload`: its current state, None if there is none."""

    def __init__(self, upload: StoredUpload | None) -> None:
        super().__init__("another request has changed this upload")
        self.upload = upload


class UploadOver(Exception):
    """The upload may not change: its round has ended, or a report on it was answered."""


class UpdateGone(FileNotFoundError):
    """An accepted update is not stored any more: its round has ended, or it was lost."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A chunk that is in the blob store. It counts if its stored upload still equals `known`."""

    assignment: AssignmentId
    known: StoredUpload | None
    begun: StoredUpload  # the upload that the chunk extends: `known`, or a new one
    chunk: Chunk
    is_last: bool

    @property
    def is_new(self) -> bool:
        return self.begun is not self.known

    @property
    def after(self) -> StoredUpload:
        """The upload once the chunk counts."""
        chunks = (*self.begun.chunks, self.chunk) if self.chunk.length else self.begun.chunks
        offset = self.begun.offset + self.chunk.length
        return replace(self.begun, offset=offset, is_complete=self.is_last, chunks=chunks)

    @property
    def dropped(self) -> tuple[Chunk, ...]:
        """The chunks of the upload that a new one replaces."""
        return self.known.chunks if self.is_new and self.known is not None else ()


class UploadStore:
    """The rows of uploads and their chunks. An upload is changed under the lock of its assignment's row."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._looks: Batches[AssignmentId, StoredUpload | None] = Batches(self._look)
        self._arrivals: Batches[Arrived, _Added] = Batches(self._add)

    async def look(self, assignment: AssignmentId) -> StoredUpload | None:
        return await self._looks.do(assignment)

    async def _look(self, assignments: Sequence[AssignmentId]) -> Sequence[StoredUpload | None]:
        async with self._db.reading() as tx:
            found = await uploads_of(tx, assignments)
        return [found.get(assignment) for assignment in assignments]

    async def add_chunk(self, arrived: Arrived) -> StoredUpload:
        """Add a chunk, durably; returns the upload with it. Raises `UploadMoved`, `UploadOver`."""
        counted: _Added | Exception = await self._arrivals.do(arrived)
        if counted is None:  # its assignment is locked: wait for the lock in a separate transaction
            async with self._db.writing("add_chunk") as tx:
                [counted] = await _added(tx, [arrived], waits=True)
        if not isinstance(counted, StoredUpload):
            raise counted or UploadOver
        return counted

    async def _add(self, batch: Sequence[Arrived]) -> Sequence[_Added | Exception]:
        """Add the chunks whose assignments are not locked; None for the others.

        The transaction holds many locks, so it waits for none: two such transactions could deadlock.
        """
        async with self._db.writing("add_chunks") as tx:
            return await _added(tx, batch, waits=False)

    async def drop(self, assignment: AssignmentId, known: StoredUpload) -> tuple[Chunk, ...]:
        """Delete an upload without an answered report; returns its chunks. Raises `UploadMoved`, `UploadOver`."""
        async with self._db.writing("drop_upload") as tx:
            is_over = await _locked(tx, [assignment], waits=True)
            if is_over.get(assignment, True):
                raise UploadOver
            stored = (await uploads_of(tx, [assignment])).get(assignment)
            if stored != known:
                raise UploadMoved(stored)
            await _drop(tx, [assignment])
        return known.chunks

    async def forget(self, assignments: Sequence[AssignmentId]) -> tuple[str, ...]:
        """Delete updates that are in a stored sum; returns the keys of their blobs."""
        async with self._db.writing("forget_updates") as tx:
            found = await uploads_of(tx, assignments, for_update=True)
            await _drop(tx, list(found))
        return tuple(chunk.key for upload in found.values() for chunk in upload.chunks)

    async def chunks(self, assignments: Sequence[AssignmentId]) -> Mapping[AssignmentId, tuple[Chunk, ...]]:
        """The chunks of complete updates, in order. Raises `UpdateGone`."""
        async with self._db.reading() as tx:
            found = await uploads_of(tx, assignments)
        for name in assignments:
            if name not in found:
                raise UpdateGone(f"the update of {name} is not stored any more")
        return {name: upload.chunks for name, upload in found.items()}


async def _added(tx: AsyncConnection, batch: Sequence[Arrived], *, waits: bool) -> Sequence[_Added | Exception]:
    """Add chunks; returns the result for each, None if its assignment is locked or unknown."""
    names = [arrived.assignment for arrived in batch]
    is_over = await _locked(tx, names, waits=waits)
    stored: dict[AssignmentId, StoredUpload] = await uploads_of(tx, names)
    counting: list[Arrived] = []
    results: list[_Added | Exception] = []
    for arrived in batch:
        before = stored.get(arrived.assignment)
        result = _decided(arrived, before, is_over.get(arrived.assignment))
        results.append(result)
        if isinstance(result, StoredUpload) and result is not before:
            stored[arrived.assignment] = result
            counting.append(arrived)
    await _save(tx, counting)
    return results


def _decided(arrived: Arrived, stored: StoredUpload | None, is_over: bool | None) -> _Added | UploadMoved | UploadOver:
    """The upload with this chunk, or why the chunk does not count.

    Returns `stored` if it has the chunk already: a transaction is retried after its connection was lost, although it
    may have been committed.
    """
    if is_over is None:
        return None
    if stored == arrived.after:
        return stored
    if is_over:
        return UploadOver()
    return UploadMoved(stored) if stored != arrived.known else arrived.after


async def _save(tx: AsyncConnection, counting: Sequence[Arrived]) -> None:
    again = [one.assignment for one in counting if one.is_new and one.known is not None]
    await _drop(tx, again)
    await _execute(tx, _ADD_UPLOAD, [_upload_row(one) for one in counting if one.is_new])
    moved = [one for one in counting if not one.is_new]
    await _execute(
        tx, _MOVE_UPLOAD, [{"name": one.assignment, "to": one.after.offset, "whole": one.is_last} for one in moved]
    )
    filled = [one for one in counting if one.chunk.length]
    await _execute(tx, _ADD_CHUNK, [_chunk_row(one) for one in filled])
    await _execute(tx, _COUNT_BYTES, [{"name": one.assignment, "up": one.chunk.length} for one in filled])


def _upload_row(arrived: Arrived) -> dict[str, object]:
    after = arrived.after
    return {
        "assignment": arrived.assignment,
        "length": after.length,
        "offset": after.offset,
        "sha256": after.sha256,
        "is_complete": after.is_complete,
    }


def _chunk_row(arrived: Arrived) -> dict[str, object]:
    offset, chunk = arrived.begun.offset, arrived.chunk
    return {"assignment": arrived.assignment, "offset": offset, "length": chunk.length, "key": chunk.key}


async def _execute(tx: AsyncConnection, statement: Executable, rows: Sequence[dict[str, object]]) -> None:
    if rows:
        await tx.execute(statement, rows)


async def _drop(tx: AsyncConnection, assignments: Sequence[AssignmentId]) -> None:
    if assignments:
        await tx.execute(_DROP_CHUNKS, {"names": assignments})
        await tx.execute(_DROP_UPLOADS, {"names": assignments})


async def _locked(tx: AsyncConnection, assignments: Sequence[AssignmentId], *, waits: bool) -> dict[AssignmentId, bool]:
    """Lock the rows of these assignments, without `waits` only the free ones; returns whether each is over.

    A report is saved under the same lock, so an accepted update cannot change any more.
    """
    found = await tx.execute(_LOCK_WAITING if waits else _LOCK_FREE, {"names": assignments})
    return {row.id: bool(row.is_over) for row in found}


async def uploads_of(
    tx: AsyncConnection, assignments: Sequence[AssignmentId], for_update: bool = False
) -> dict[AssignmentId, StoredUpload]:
    """The existing uploads of these assignments. `for_update`: lock the assignments first."""
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
