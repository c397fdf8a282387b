"""Resumable uploads of updates (draft-ietf-httpbis-resumable-upload, as `docs/wire.md` has it).

A chunk is written behind what is already there and counts only when it is whole, matches its digest and is on disk;
then the stored offset moves. The last chunk is answered after the whole update has been checked. Of two requests that
send to the same upload, the newer wins: the older is most likely a connection that has died without a word. Nothing of
the older is held back in memory, and an upload that is begun again gets a file of its own: what has been checked stays.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from weakref import WeakValueDictionary

from umbel.aggregation.errors import LyingLength, UpdateRefused
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.aggregation.wire import Codec, expected_bytes
from umbel.server.coordinator import Coordinator, Place
from umbel.server.driver import RunDriver
from umbel.server.files import sync_file
from umbel.server.problems import Refused
from umbel.server.services import Services
from umbel.server.stored import StoredUpload, Traffic
from umbel.server.updates import check_update


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's part of an update. `is_last`: with it, the update is whole."""

    offset: int
    is_last: bool
    body: AsyncIterator[bytes]


class Uploads:
    """The updates on their way to this coordinator."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        self._services = services
        self._coordinator = coordinator
        self._writers: dict[AssignmentId, object] = {}
        self._locks: WeakValueDictionary[AssignmentId, asyncio.Lock] = WeakValueDictionary()

    async def begin(
        self, client: ClientId, assignment: AssignmentId, length: int, sha256: str, chunk: Chunk
    ) -> StoredUpload:
        """Begin an upload with its first chunk, or begin it again. A whole one stays as it is."""
        place = await self._coordinator.place(client, assignment)
        known = place.upload
        if known is not None and known.is_complete:
            return await self._repeat(known, sha256, chunk)
        place.require_open()
        _require_length(place.driver, length)
        return await self._append(place, StoredUpload(length, 0, sha256, is_complete=False), chunk)

    async def append(self, client: ClientId, assignment: AssignmentId, chunk: Chunk) -> StoredUpload:
        """Add the next chunk. Raises `Refused` with the offset to go on from if this is not it."""
        place = await self._coordinator.place(client, assignment)
        known = _known(place)
        _require_offset(known, chunk)
        if known.is_complete:
            return await self._repeat_end(known, chunk)
        place.require_open()
        return await self._append(place, known, chunk)

    async def look(self, client: ClientId, assignment: AssignmentId) -> StoredUpload:
        """How far an upload has come."""
        return _known(await self._coordinator.place(client, assignment))

    async def forget(self, client: ClientId, assignment: AssignmentId) -> None:
        """Drop an upload that has not been reported."""
        place = await self._coordinator.place(client, assignment)
        _known(place)
        async with self._lock(assignment), place.driver.lock:
            self._writers.pop(assignment, None)
            await self._drop(place)

    async def _append(self, place: Place, upload: StoredUpload, chunk: Chunk) -> StoredUpload:
        """Write a chunk, then make it count. The locks are held while the books are written, not while bytes travel."""
        assignment, me, is_counted = place.assignment, object(), False
        await self._take_over(place, upload, chunk, me)
        try:
            received = await self._write(place, upload, chunk, me)
            async with self._lock(assignment):
                self._require_newest(place, me)
                counted = await self._count(place, upload, received, chunk.is_last)
            is_counted = True
            return counted
        finally:
            if self._writers.get(assignment) is me:
                del self._writers[assignment]
                if not is_counted and upload.offset == 0:
                    self._services.upload_path(assignment).unlink(missing_ok=True)

    async def _take_over(self, place: Place, upload: StoredUpload, chunk: Chunk, me: object) -> None:
        """From now on, this request writes the upload; one that begins it again forgets what there was."""
        async with self._lock(place.assignment):
            known = place.upload
            if known is not None and known.is_complete:
                raise _mismatch(known.offset, "the upload was completed by another request")
            if upload.offset:
                _require_offset(_known(place), chunk)
            elif known is not None:
                async with place.driver.lock:
                    await self._drop(place)
            self._writers[place.assignment] = me

    async def _write(self, place: Place, upload: StoredUpload, chunk: Chunk, me: object) -> int:
        """Write the body behind what is there; how many bytes came. Pieces are small: none is worth a thread."""
        received = 0
        self._require_newest(place, me)
        with _open_at(self._services.upload_path(place.assignment), chunk.offset) as file:
            async for piece in chunk.body:
                self._require_newest(place, me)
                received += len(piece)
                if chunk.offset + received > upload.length:
                    raise LyingLength(f"the upload was declared to have {upload.length} bytes, and more came")
                _write_all(file, piece)
                place.driver.note_traffic(place.client, Traffic(up=len(piece)))
        return received

    async def _count(self, place: Place, upload: StoredUpload, received: int, is_last: bool) -> StoredUpload:
        """Make a written chunk count, and the update with it if this was the last one."""
        driver, offset = place.driver, upload.offset + received
        if is_last and offset != upload.length:
            raise LyingLength(f"the upload was declared to have {upload.length} bytes, but it ends after {offset}")
        await self._settle(place, upload, is_last)
        counted = StoredUpload(upload.length, offset, upload.sha256, is_last)
        async with driver.lock:
            place.require_open()
            await self._services.store.save_upload(place.assignment, counted, is_new=place.upload is None)
            driver.members[place.client].upload = counted
        return counted

    async def _settle(self, place: Place, upload: StoredUpload, is_last: bool) -> None:
        """Have the chunk on disk; check the update if it is whole, and drop what can never be folded."""
        path, driver = self._services.upload_path(place.assignment), place.driver
        grid = place.require_open().plan.grid

        def settle() -> None:
            sync_file(path)
            if upload.offset == 0:
                sync_file(path.parent)
            if is_last:
                check_update(path, upload.sha256, driver.layout, grid)

        try:
            await asyncio.get_running_loop().run_in_executor(self._services.worker, settle)
        except (UpdateRefused, Refused):
            async with driver.lock:
                await self._drop(place)
            raise
        except FileNotFoundError as error:
            raise Refused("assignment-closed", "the round ended while this update was on its way") from error

    async def _drop(self, place: Place) -> None:
        """Forget an upload that no report stands on. The caller holds the driver's lock."""
        place.require_open()
        if place.upload is not None:
            await self._services.store.forget_upload(place.assignment)
            place.driver.members[place.client].upload = None
        self._services.upload_path(place.assignment).unlink(missing_ok=True)

    async def _repeat(self, known: StoredUpload, sha256: str, chunk: Chunk) -> StoredUpload:
        if known.sha256 != sha256:
            raise Refused("upload-complete", "another update was completed for this assignment; report that one")
        async for _ in chunk.body:
            pass  # it came again because its answer was lost: take it, and say the same
        return known

    async def _repeat_end(self, known: StoredUpload, chunk: Chunk) -> StoredUpload:
        """A chunk at the end of a whole upload: nothing, sent again, is taken as said; anything more is too much."""
        async for piece in chunk.body:
            if piece:
                raise LyingLength(f"the upload was declared to have {known.length} bytes, and more came")
        return known

    def _require_newest(self, place: Place, me: object) -> None:
        if self._writers.get(place.assignment) is not me:
            offset = place.upload.offset if place.upload else 0
            raise _mismatch(offset, "a newer request took over this upload; go on from its offset")

    def _lock(self, assignment: AssignmentId) -> asyncio.Lock:
        lock = self._locks.get(assignment)
        if lock is None:
            lock = self._locks[assignment] = asyncio.Lock()
        return lock


def _known(place: Place) -> StoredUpload:
    if place.upload is None:
        raise Refused("unknown-upload", "no upload was begun for this assignment; begin one with POST")
    return place.upload


def _open_at(path: Path, offset: int) -> FileIO:
    """The update's file, ready to write at `offset`; what an uncounted chunk left behind that is cut off.

    Unbuffered, for a superseded request would flush its buffer over the file of the newer one; and a new file for a new
    upload, so that no request which still has an older one open can touch it.
    """
    if offset == 0:
        path.unlink(missing_ok=True)
    flags = os.O_RDWR | (0 if offset else os.O_CREAT | os.O_EXCL)
    file = FileIO(os.open(path, flags, 0o600), "r+")
    file.truncate(offset)
    file.seek(offset)
    return file


def _write_all(file: FileIO, piece: bytes) -> None:
    """Unbuffered writes may be short."""
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


def _require_length(driver: RunDriver, length: int) -> None:
    expected = expected_bytes(Codec.FLOAT32, driver.layout.n_values)
    if length != expected:
        raise LyingLength(f"Upload-Length is {length}, but an update of this model has {expected} bytes")


def _require_offset(known: StoredUpload, chunk: Chunk) -> None:
    if chunk.offset != known.offset:
        raise _mismatch(
            known.offset, f"the upload stands at {known.offset} bytes, not {chunk.offset}; go on from there"
        )


def _mismatch(offset: int, detail: str) -> Refused:
    return Refused("mismatching-upload-offset", detail, {"Upload-Offset": str(offset)})
