"""Resumable uploads of updates (draft-ietf-httpbis-resumable-upload, as `docs/wire.md` has it).

A chunk is written to a file of its own, and becomes a blob of its own when it is whole and matches its digest; then, in
one transaction, it counts. Chunks of one update may come to different replicas. Of two requests that send the same
part, the first to be whole counts, and the other is told where the upload stands. The last chunk counts only with the
whole update, checked.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from umbel.aggregation.errors import LyingLength, ProtocolViolation, UpdateRefused
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.aggregation.wire import Codec, expected_bytes
from umbel.server.blobs import BlobStore
from umbel.server.coordinator import Coordinator, Place
from umbel.server.driver import RunDriver
from umbel.server.problems import Refused
from umbel.server.services import Services
from umbel.server.stored import Chunk, StoredUpload
from umbel.server.updates import check_update
from umbel.server.upload_store import UploadMoved, UploadOver

_HELD_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Incoming:
    """One request's part of an update. `is_last`: with it, the update is whole."""

    offset: int
    is_last: bool
    body: AsyncIterator[bytes]


class Uploads:
    """The updates on their way to this coordinator."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        self._services = services
        self._coordinator = coordinator
        self._locks: WeakValueDictionary[AssignmentId, asyncio.Lock] = WeakValueDictionary()

    async def begin(
        self, client: ClientId, assignment: AssignmentId, length: int, sha256: str, incoming: Incoming
    ) -> StoredUpload:
        """Begin an upload with its first chunk, or begin it again. A whole one stays as it is."""
        place = await self._coordinator.place(client, assignment)
        known = await self._services.uploads.look(assignment)
        if known is not None and known.is_complete:
            return await _repeat(known, sha256, incoming)
        place.require_open()
        _require_length(place.driver, length)
        return await self._append(place, known, StoredUpload(length, 0, sha256, is_complete=False), incoming)

    async def append(self, client: ClientId, assignment: AssignmentId, incoming: Incoming) -> StoredUpload:
        """Add the next chunk. Raises `Refused` with the offset to go on from if this is not it."""
        place = await self._coordinator.place(client, assignment)
        known = _known(await self._services.uploads.look(assignment))
        _require_offset(known, incoming)
        if known.is_complete:
            return await _repeat_end(known, incoming)
        place.require_open()
        return await self._append(place, known, known, incoming)

    async def look(self, client: ClientId, assignment: AssignmentId) -> StoredUpload:
        """How far an upload has come."""
        await self._coordinator.place(client, assignment)
        return _known(await self._services.uploads.look(assignment))

    async def forget(self, client: ClientId, assignment: AssignmentId) -> None:
        """Drop an upload that has not been reported."""
        place = await self._coordinator.place(client, assignment)
        known = _known(await self._services.uploads.look(assignment))
        place.require_open()
        await self._drop(assignment, known)

    async def _append(
        self, place: Place, known: StoredUpload | None, begun: StoredUpload, incoming: Incoming
    ) -> StoredUpload:
        """Take a chunk in, store it, and make it count."""
        blobs, key = self._services.blobs, _key(place.assignment, begun.offset)
        length = await _store(blobs, key, begun, incoming)
        try:
            counted, dropped = await self._count(place, known, begun, Chunk(key, length), incoming.is_last)
        except (Refused, ProtocolViolation):
            # Only where it is certain that the chunk does not count. Of a transaction whose connection was lost nobody
            # can tell: that chunk stays, and is swept after the round if it does not count.
            await self._remove([key] if length else [])
            raise
        await self._remove(one.key for one in dropped)
        return counted

    async def _count(
        self, place: Place, known: StoredUpload | None, begun: StoredUpload, chunk: Chunk, is_last: bool
    ) -> tuple[StoredUpload, tuple[Chunk, ...]]:
        """Make a stored chunk count, the last one only with a whole update that has passed its checks."""
        if not is_last:
            return await self._add(place, known, begun, chunk, is_last)
        async with self._checking(place.assignment):  # a check reads all of it: whoever comes second sees what it says
            if (now := await self._services.uploads.look(place.assignment)) != known:
                raise _mismatch(now)
            await self._check(place, known, begun, chunk)
            return await self._add(place, known, begun, chunk, is_last)

    async def _add(
        self, place: Place, known: StoredUpload | None, begun: StoredUpload, chunk: Chunk, is_last: bool
    ) -> tuple[StoredUpload, tuple[Chunk, ...]]:
        place.require_open()
        try:
            return await self._services.uploads.add_chunk(place.assignment, known, begun, chunk, is_last)
        except UploadMoved as moved:
            raise _mismatch(moved.upload) from moved
        except UploadOver as over:
            raise _over() from over

    def _checking(self, assignment: AssignmentId) -> asyncio.Lock:
        lock = self._locks.get(assignment)
        if lock is None:
            lock = self._locks[assignment] = asyncio.Lock()
        return lock

    async def _check(self, place: Place, known: StoredUpload | None, begun: StoredUpload, last: Chunk) -> None:
        """Check the whole update, and drop what can never be folded."""
        chunks = (*begun.chunks, last) if last.length else begun.chunks
        grid, layout = place.require_open().plan.grid, place.driver.layout
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._services.checker, check_update, self._services.blobs, chunks, begun.sha256, layout, grid
            )
        except (UpdateRefused, Refused):
            if known is not None:
                await self._drop(place.assignment, known)
            raise
        except FileNotFoundError as error:
            raise Refused("assignment-closed", "the round ended while this update was on its way") from error

    async def _drop(self, assignment: AssignmentId, known: StoredUpload) -> None:
        try:
            dropped = await self._services.uploads.drop(assignment, known)
        except UploadMoved as moved:
            raise _mismatch(moved.upload) from moved
        except UploadOver as over:
            raise _over() from over
        await self._remove(chunk.key for chunk in dropped)

    async def _remove(self, keys: Iterable[str]) -> None:
        if keys := list(keys):
            await asyncio.to_thread(self._services.blobs.delete, keys)


async def _store(blobs: BlobStore, key: str, upload: StoredUpload, incoming: Incoming) -> int:
    """Take a chunk's body in and store it; how many bytes came.

    A small one is held in memory until it is whole: a request that sends little costs no file. Pieces are small: to
    write one is not worth a thread.
    """
    held, length, left = bytearray(), 0, upload.length - upload.offset
    with ExitStack() as files:
        path: Path | None = None
        file: BinaryIO | None = None
        async for piece in incoming.body:
            length += len(piece)
            if length > left:
                raise LyingLength(f"the upload was declared to have {upload.length} bytes, and more came")
            if file is None and length <= _HELD_BYTES_MAX:
                held += piece
                continue
            if file is None:
                path = files.enter_context(blobs.scratch())
                file = files.enter_context(path.open("wb"))
                file.write(held)
            file.write(piece)
        if incoming.is_last and length != left:
            end = upload.offset + length
            raise LyingLength(f"the upload was declared to have {upload.length} bytes, but it ends after {end}")
        if path is not None and file is not None:
            file.close()
            await asyncio.to_thread(blobs.put, path, key)
        elif length:
            await asyncio.to_thread(_put_small, blobs, bytes(held), key)
    return length


def _put_small(blobs: BlobStore, data: bytes, key: str) -> None:
    with blobs.scratch() as path:
        path.write_bytes(data)
        blobs.put(path, key)


async def _repeat(known: StoredUpload, sha256: str, incoming: Incoming) -> StoredUpload:
    if known.sha256 != sha256:
        raise Refused("upload-complete", "another update was completed for this assignment; report that one")
    async for _ in incoming.body:
        pass  # it came again because its answer was lost: take it, and say the same
    return known


async def _repeat_end(known: StoredUpload, incoming: Incoming) -> StoredUpload:
    """A chunk at the end of a whole upload: nothing, sent again, is taken as said; anything more is too much."""
    async for piece in incoming.body:
        if piece:
            raise LyingLength(f"the upload was declared to have {known.length} bytes, and more came")
    return known


def _key(assignment: AssignmentId, offset: int) -> str:
    """A name that no other request can have: what counts is never written over."""
    return f"updates/{assignment}/{offset}-{secrets.token_hex(8)}"


def _known(upload: StoredUpload | None) -> StoredUpload:
    if upload is None:
        raise Refused("unknown-upload", "no upload was begun for this assignment; begin one with POST")
    return upload


def _require_length(driver: RunDriver, length: int) -> None:
    expected = expected_bytes(Codec.FLOAT32, driver.layout.n_values)
    if length != expected:
        raise LyingLength(f"Upload-Length is {length}, but an update of this model has {expected} bytes")


def _require_offset(known: StoredUpload, incoming: Incoming) -> None:
    if incoming.offset != known.offset:
        raise _mismatch(known)


def _mismatch(upload: StoredUpload | None) -> Refused:
    if upload is None:
        return Refused("unknown-upload", "this upload was dropped meanwhile; begin it with POST")
    detail = f"the upload stands at {upload.offset} bytes; go on from there"
    return Refused("mismatching-upload-offset", detail, {"Upload-Offset": str(upload.offset)})


def _over() -> Refused:
    return Refused("assignment-closed", "the round no longer waits for this update; check in for the next one")
