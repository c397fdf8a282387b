"""Resumable uploads of updates (draft-ietf-httpbis-resumable-upload, as in `docs/reference/wire.md`).

Each chunk is received into its own file. When it is whole and matches its digest it becomes its own blob; then one
transaction makes it count. Chunks of one update may come to different replicas. If two requests send the same part, the
first whole one counts, and the other gets the upload's offset. The last chunk counts only after a check of the whole
update.

Each chunk takes a place (`Intake`) before its first byte is read, and keeps it until the chunk counts or is dropped, so
that bodies that never end do not fill the disk. A client has at most `EACH_MAX` places for one run. All chunks of this
process have at most `bytes_max` bytes, by their declared lengths.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from umbel.aggregation.errors import LyingLength, ProtocolViolation, UpdateRefused
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.aggregation.update.wire import least_chunk_bytes
from umbel.server.blobs.blobs import BlobStore
from umbel.server.problems import Refused
from umbel.server.runs.reception import AssignmentPlace, Reception
from umbel.server.services import Services
from umbel.server.store.stored import Chunk, StoredUpload
from umbel.server.store.uploads import Arrived, UploadMoved, UploadOver
from umbel.server.sums.torch_import import torch_imported
from umbel.server.sums.updates import check_update, length_in_words

EACH_MAX = 2
PATIENCE_S = 30.0
"""How long a chunk keeps its place while others wait. Clients choose chunks that take two seconds to send."""
_HELD_BYTES_MAX = 64 << 10
_CHECKS_MAX, _CHECKS_KEPT = 5, 10_000


class Arrival:
    """One chunk that is being received. `owner`: its client and run."""

    __slots__ = ("_timeout", "came_at", "n_bytes", "owner")

    def __init__(self, owner: str, n_bytes: int) -> None:
        self.owner = owner
        self.n_bytes = n_bytes
        self.came_at = time.monotonic()
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def receiving(self) -> AsyncGenerator[None]:
        """Receive the body in this block. Raises `Refused` if the chunk loses its place meanwhile."""
        try:
            async with asyncio.timeout(None) as self._timeout:
                yield
        except TimeoutError as error:
            # The rest of the body stays unread, so the connection must close.
            raise _too_many(
                "a newer chunk replaced this chunk; send this chunk again", {"Connection": "close"}
            ) from error
        finally:
            self._timeout = None

    @property
    def can_go(self) -> bool:
        return self._timeout is not None

    def let_go(self) -> None:
        assert self._timeout is not None, "`can_go` is checked first"
        self._timeout.reschedule(asyncio.get_running_loop().time())
        self._timeout = None


class Intake:
    """The chunks that this process is receiving, the oldest first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._here: dict[Arrival, None] = {}
        self._n_bytes = 0

    @contextmanager
    def place(self, owner: str, n_bytes: int) -> Generator[Arrival]:
        """Reserve a place for a chunk of `n_bytes` during the block.

        A new chunk replaces the oldest of the same owner, because a client whose network failed sends it again. It
        replaces a chunk of another owner only after `PATIENCE_S`. Raises `Refused` if it can replace none.
        """
        arrival = Arrival(owner, n_bytes)
        self._make_room(arrival)
        self._here[arrival] = None
        self._n_bytes += n_bytes
        try:
            yield arrival
        finally:
            self._forget(arrival)

    def _make_room(self, newcomer: Arrival) -> None:
        own = [one for one in self._here if one.owner == newcomer.owner]
        if len(own) >= EACH_MAX:
            newcomer.came_at = own[0].came_at  # it inherits that chunk's place, with its age
            self._let_go(own, "this client's earlier chunks are still being checked")
        patient_until = time.monotonic() - PATIENCE_S
        while self._n_bytes + newcomer.n_bytes > self._bytes_max:
            late = [one for one in self._here if one.came_at <= patient_until]
            self._let_go(late, "other chunks fill the coordinator's room for uploads (incoming_bytes_max)")

    def _let_go(self, candidates: list[Arrival], why_not: str) -> None:
        """Drop the oldest of these that can be dropped."""
        oldest = next((one for one in candidates if one.can_go), None)
        if oldest is None:
            raise _too_many(f"{why_not}; try again in a second")
        oldest.let_go()
        self._forget(oldest)

    def _forget(self, arrival: Arrival) -> None:
        if arrival in self._here:
            del self._here[arrival]
            self._n_bytes -= arrival.n_bytes


def _too_many(detail: str, headers: dict[str, str] | None = None) -> Refused:
    return Refused("too-many-chunks", detail, {"Retry-After": "1", **(headers or {})})


@dataclass(frozen=True, slots=True)
class Incoming:
    """One request's part of an update."""

    offset: int
    is_last: bool  # the update is whole with it
    n_bytes: int  # of `body`, as declared
    body: AsyncIterator[bytes]


class Uploads:
    """Receives updates."""

    def __init__(self, services: Services, reception: Reception) -> None:
        self._services = services
        self._reception = reception
        self._intake = Intake(services.settings.incoming_bytes_max)
        self._locks: WeakValueDictionary[AssignmentId, asyncio.Lock] = WeakValueDictionary()
        self._n_checks: dict[AssignmentId, int] = {}

    async def begin(
        self, client: ClientId, assignment: AssignmentId, length: int, sha256: str, incoming: Incoming
    ) -> StoredUpload:
        """Begin an upload with its first chunk, or begin it again. A complete upload stays as it is."""
        place = await self._reception.place(client, assignment)
        await torch_imported()  # the codec needs it
        known = await self._services.uploads.look(assignment)
        if known is not None and known.is_complete:
            return await _repeat(known, sha256, incoming)
        place.require_open()
        if self._n_checks.get(assignment, 0) >= _CHECKS_MAX:
            detail = (
                f"{_CHECKS_MAX} uploads for this assignment were checked, and the coordinator checks no more; check in "
                "again for a new assignment"
            )
            raise Refused("assignment-closed", detail)
        codec = place.driver.codec.of(place.driver.live)
        if length not in codec.update_bytes:
            raise LyingLength(
                f"Upload-Length is {length}, but an update for this assignment has {length_in_words(codec)}"
            )
        return await self._append(place, known, StoredUpload(length, 0, sha256, is_complete=False), incoming)

    async def append(self, client: ClientId, assignment: AssignmentId, incoming: Incoming) -> StoredUpload:
        """Add the next chunk. Raises `Refused` with the right offset if this is another chunk."""
        place = await self._reception.place(client, assignment)
        await torch_imported()  # the check of the whole update needs it
        known = _known(await self._services.uploads.look(assignment))
        if incoming.offset != known.offset:
            raise _mismatch(known)
        if known.is_complete:
            return await _repeat_end(known, incoming)
        place.require_open()
        return await self._append(place, known, known, incoming)

    async def look(self, client: ClientId, assignment: AssignmentId) -> StoredUpload:
        """The state of an upload."""
        await self._reception.place(client, assignment)
        return _known(await self._services.uploads.look(assignment))

    async def forget(self, client: ClientId, assignment: AssignmentId) -> None:
        """Drop an upload that has not been reported."""
        place = await self._reception.place(client, assignment)
        known = _known(await self._services.uploads.look(assignment))
        place.require_open()
        await self._drop(assignment, known)

    async def _append(
        self, place: AssignmentPlace, known: StoredUpload | None, begun: StoredUpload, incoming: Incoming
    ) -> StoredUpload:
        """Receive a chunk, store it, and make it count."""
        _require_fit(begun, incoming, self._services.settings.chunk_bytes_max)
        with self._intake.place(f"{place.client} {place.driver.name}", incoming.n_bytes) as arrival:
            # No other request has this key, so a chunk that counts is never overwritten.
            key = f"updates/{place.assignment}/{begun.offset}-{secrets.token_hex(8)}"
            chunk = Chunk(key, incoming.n_bytes)
            await _store(self._services.blobs, chunk, incoming.body, arrival)
            return await self._take(place, Arrived(place.assignment, known, begun, chunk, incoming.is_last))

    async def _take(self, place: AssignmentPlace, arrived: Arrived) -> StoredUpload:
        """Make a stored chunk count, or remove it."""
        try:
            counted = await self._count(place, arrived)
        except (Refused, ProtocolViolation):
            # These errors mean that the chunk does not count. If the database connection was lost, it may count: the
            # chunk stays, and is swept after the round if it does not.
            await self._remove([arrived.chunk.key] if arrived.chunk.length else [])
            raise
        await self._remove(one.key for one in arrived.dropped)
        return counted

    async def _count(self, place: AssignmentPlace, arrived: Arrived) -> StoredUpload:
        """Make a stored chunk count. The last one counts only if the whole update passes its check."""
        if not arrived.is_last:
            return await self._add(place, arrived)
        # A check reads the whole update, so a second request waits for the first.
        async with self._locks.setdefault(place.assignment, asyncio.Lock()):
            if (now := await self._services.uploads.look(place.assignment)) != arrived.known:
                raise _mismatch(now)
            await self._check(place, arrived)
            return await self._add(place, arrived)

    async def _add(self, place: AssignmentPlace, arrived: Arrived) -> StoredUpload:
        place.require_open()
        with _refusing():
            return await self._services.uploads.add_chunk(arrived)

    def _note_check(self, assignment: AssignmentId) -> None:
        """Count checks, because checking an update costs far more than sending a compressed one."""
        self._n_checks[assignment] = self._n_checks.pop(assignment, 0) + 1
        while len(self._n_checks) > _CHECKS_KEPT:
            del self._n_checks[next(iter(self._n_checks))]

    async def _check(self, place: AssignmentPlace, arrived: Arrived) -> None:
        """Check the whole update, and drop one that can never be folded."""
        whole = arrived.after
        place.require_open()
        live, round_codec = place.driver.live, place.driver.codec
        codec, rank = round_codec.of(live), round_codec.rank(live, place.client)
        self._note_check(place.assignment)
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._services.checker, check_update, self._services.blobs, whole.chunks, whole.sha256, codec, rank
            )
        except (UpdateRefused, Refused):
            if arrived.known is not None:
                await self._drop(place.assignment, arrived.known)
            raise
        except FileNotFoundError as error:
            raise Refused("assignment-closed", "the round ended while this update was being uploaded") from error

    async def _drop(self, assignment: AssignmentId, known: StoredUpload) -> None:
        with _refusing():
            dropped = await self._services.uploads.drop(assignment, known)
        await self._remove(chunk.key for chunk in dropped)

    async def _remove(self, keys: Iterable[str]) -> None:
        if keys := list(keys):
            await asyncio.to_thread(self._services.blobs.delete, keys)


async def _store(blobs: BlobStore, chunk: Chunk, body: AsyncIterator[bytes], arrival: Arrival) -> None:
    """Receive a chunk's body and store it.

    A small chunk stays in memory until it is whole, so that a request with few bytes needs no file. The pieces of a
    large one are written without a thread, because each is small.
    """
    if chunk.length <= _HELD_BYTES_MAX:
        async with arrival.receiving():
            data = b"".join([piece async for piece in body])
        if data:
            await asyncio.to_thread(_put_small, blobs, data, chunk.key)
        return
    with blobs.scratch() as path:
        with path.open("wb") as file:
            async with arrival.receiving():
                async for piece in body:
                    file.write(piece)
        await asyncio.to_thread(blobs.put, path, chunk.key)


def _put_small(blobs: BlobStore, data: bytes, key: str) -> None:
    with blobs.scratch() as path:
        path.write_bytes(data)
        blobs.put(path, key)


async def _repeat(known: StoredUpload, sha256: str, incoming: Incoming) -> StoredUpload:
    if known.sha256 != sha256:
        raise Refused(
            "upload-complete", "another update was already uploaded completely for this assignment; report that one"
        )
    async for _ in incoming.body:
        pass  # a repeated request, whose answer was lost, gets the same answer
    return known


async def _repeat_end(known: StoredUpload, incoming: Incoming) -> StoredUpload:
    """Answer a repeated empty last chunk of a complete upload. Raises `LyingLength` for more bytes."""
    async for piece in incoming.body:
        if piece:
            raise LyingLength(f"Upload-Length is {known.length} bytes, but more bytes arrived")
    return known


def _known(upload: StoredUpload | None) -> StoredUpload:
    if upload is None:
        raise Refused("unknown-upload", "this assignment has no upload; begin one with POST")
    return upload


def _require_fit(upload: StoredUpload, incoming: Incoming, chunk_bytes_max: int) -> None:
    """Refuse a chunk of a wrong length before a byte of it is read."""
    left = upload.length - upload.offset
    if incoming.n_bytes > left:
        raise LyingLength(f"Upload-Length is {upload.length} bytes, but more bytes arrived")
    if incoming.is_last and incoming.n_bytes != left:
        end = upload.offset + incoming.n_bytes
        raise LyingLength(f"Upload-Length is {upload.length} bytes, but the last chunk ends after {end} bytes")
    # If the cap is below the rule's least length, a client that halves its chunks must still find one that passes.
    least = min(least_chunk_bytes(upload.length), chunk_bytes_max // 2)
    if 0 < incoming.n_bytes < min(least, left):
        raise Refused(
            "short-chunk",
            f"the chunk has {incoming.n_bytes} bytes; each chunk of this update but the last needs at least {least}",
        )


def _mismatch(upload: StoredUpload | None) -> Refused:
    if upload is None:
        return Refused(
            "unknown-upload",
            "this upload was dropped, because a newer one began or the round ended; begin it again with POST",
        )
    detail = f"{upload.offset} bytes of the upload have arrived; continue at this offset"
    return Refused("mismatching-upload-offset", detail, {"Upload-Offset": str(upload.offset)})


@contextmanager
def _refusing() -> Generator[None]:
    """Turn the store's refusals into `Refused`."""
    try:
        yield
    except UploadMoved as moved:
        raise _mismatch(moved.upload) from moved
    except UploadOver as over:
        detail = "the round no longer waits for this update; check in for the next one"
        raise Refused("assignment-closed", detail) from over
