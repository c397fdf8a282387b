"""This replica's share of a round's sum: folded as reports come, then handed in to the blob store.

A worker thread folds one update at a time. Each replica folds the reports that it received. If a replica dies, another
adopts its reports (`RoundStore.adopt`) and folds them again from the stored updates. The sum has the same bits
whichever replica adds.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from sqlalchemy.exc import SQLAlchemyError
from torch import Tensor

from umbel.aggregation.codec.update_codec import UpdateReader
from umbel.aggregation.model.layout import PIECE_VALUES
from umbel.aggregation.plans.codec import Part
from umbel.aggregation.round.states import Abandoned, Accepted, Closing, Committed
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.aggregation.update.grid import IntegerSum
from umbel.server.blobs.blobs import BlobStore
from umbel.server.services import Services
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.stored import Chunk, LiveRun, PartialSum
from umbel.server.store.uploads import UpdateGone
from umbel.server.sums.updates import RoundCodec, fill, integers

_log = logging.getLogger(__name__)
KEPT_MAX = 16  # masked updates kept before a hand-in; they are several times the bytes of the sum that is written then
HAND_IN_S = 5.0  # least time between two hand-ins of a masked sum, which is as large as eight updates


@dataclass(frozen=True, slots=True)
class HandedIn:
    """A sum as it was written to a file. `clients`: exactly those whose updates are in it."""

    sha256: str
    total_weight: int
    clients: frozenset[ClientId]


class Folding:
    """One round's sum, and the folds that are still to be added to it."""

    def __init__(self, codec: UpdateReader, blobs: BlobStore, worker: Executor) -> None:
        self.clients: set[ClientId] = set()  # whose updates were added here, or are about to be
        self.merged: set[ClientId] = set()  # whose updates came with the sums of other replicas
        self._codec = codec
        self._blobs = blobs
        self._worker = worker
        self._total: IntegerSum | None = None
        self._in_total: set[ClientId] = set()  # whose updates are in `_total`; only the worker changes both
        self._pending: list[asyncio.Future[None]] = []
        self._is_discarded = False

    def add(self, client: ClientId, chunks: Sequence[Chunk], part: Part) -> None:
        """Fold a stored update after those added before. Does nothing if the client's update was added already."""
        if client in self.clients:
            return
        self.clients.add(client)
        loop = asyncio.get_running_loop()
        self._pending.append(loop.run_in_executor(self._worker, self._fold, client, chunks, part))

    async def total(self) -> IntegerSum:
        """Wait until every fold is in and return the sum; zero if there was no fold.

        Raises `SumDropped`, or what a fold raised: then make a new `Folding` from the stored updates.
        """
        await self._settled(*self._pending)
        return self._accumulator()

    async def merge(self, partial: PartialSum) -> None:
        """Add the sum of another replica, a piece at a time. Raises `DamagedSum`, `SumDropped`."""
        loop = asyncio.get_running_loop()
        self._pending.append(loop.run_in_executor(self._worker, self._merge, partial))
        await self._settled(self._pending[-1])
        self.merged |= set(partial.clients)

    async def restore(self, partial: PartialSum) -> None:
        """Begin with the sum that this replica handed in before. Raises `DamagedSum`, `SumDropped`."""
        await self.merge(partial)
        self.merged -= set(partial.clients)
        self.clients |= set(partial.clients)

    async def write(self, path: Path) -> HandedIn:
        """Write the sum of all updates added so far to a file, for another replica to merge.

        Updates that are added during the call are folded after it. Raises `SumDropped`, or what a fold raised.
        """
        pending, loop = tuple(self._pending), asyncio.get_running_loop()
        written = await loop.run_in_executor(self._worker, self._write, path)
        await self._settled(*pending)
        return written

    async def discard(self) -> None:
        """Stop folding and drop the sum. Callers that wait for it get `SumDropped`."""
        self._is_discarded = True
        for fold in self._pending:
            fold.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        self._pending.clear()
        self.clients, self.merged = set(), set()
        self._total = None

    async def _settled(self, *pending: asyncio.Future[None]) -> None:
        """Wait for folds. If `discard` has cancelled them, raise `SumDropped` instead of `CancelledError`."""
        try:
            await asyncio.gather(*pending)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self._is_discarded:
                raise
        if self._is_discarded:
            raise SumDropped

    def _accumulator(self) -> IntegerSum:
        """The sum: int64, twice the size of a float32 model. It is allocated when it is first needed."""
        if self._total is None:
            self._total = self._codec.new_sum()
        return self._total

    def _fold(self, client: ClientId, chunks: Sequence[Chunk], part: Part) -> None:
        self._accumulator().add(integers(self._blobs, chunks, self._codec, part.rank), part.weight)
        self._in_total.add(client)

    def _merge(self, partial: PartialSum) -> None:
        sha = hashlib.sha256()
        self._accumulator().merge_sums(
            _read(self._blobs, partial.key, sha.update), partial.total_weight, len(partial.clients)
        )
        if sha.hexdigest() != partial.sha256:
            raise DamagedSum(f"the partial sum {partial.key} has changed since replica {partial.replica} wrote it")
        self._in_total.update(partial.clients)

    def _write(self, path: Path) -> HandedIn:
        """Write the sum. This runs in the worker, as folds do, so no fold is half in the sum."""
        if self._is_discarded:
            raise SumDropped
        total, sha = self._accumulator(), hashlib.sha256()
        with path.open("wb") as file:
            for piece in torch.split(total.sums, PIECE_VALUES):
                data = piece.numpy().astype("<i8", copy=False).data
                sha.update(data)
                file.write(data)
        return HandedIn(sha.hexdigest(), total.total_weight, frozenset(self._in_total))


class SumDropped(Exception):
    """The sum was dropped while a caller waited for it: its round is over, or the sum is to be made again."""


class DamagedSum(OSError):
    """A stored part of a sum was changed. Fold the updates again."""


def _read(blobs: BlobStore, key: str, hashed: Callable[[memoryview], None]) -> Iterator[Tensor]:
    """The integers of a partial sum, in pieces. Each piece overwrites the one before."""
    buffer = memoryview(bytearray(8 * PIECE_VALUES))
    with blobs.open(key) as file:
        while n_bytes := fill(file, buffer):
            hashed(buffer[:n_bytes])
            yield torch.frombuffer(buffer[:n_bytes], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Posted:
    """The sum that was handed in last."""

    round_id: int
    key: str
    clients: frozenset[ClientId]
    at: float  # Unix seconds


class ReplicaShare:
    """The share of a run's newest attempt. Pass the run in its current state to each method."""

    def __init__(self, services: Services, codec: RoundCodec) -> None:
        self._services = services
        self._codec = codec
        self._folding: Folding | None = None
        self._newest: LiveRun | None = None  # as it was at the last fold
        self._n_posted = 0
        self._posted: _Posted | None = None
        self._posting = asyncio.Lock()  # two at once: the older could delete the newer's file
        self._forgotten: frozenset[ClientId] = frozenset()  # whose updates, in the posted sum, were deleted
        self._handing_in: asyncio.Task[None] | None = None
        self._is_due = asyncio.Event()  # set when the next hand-in must not wait

    # --- folding ------------------------------------------------------------------------------------------------------

    def fold(self, live: LiveRun, client: ClientId, chunks: Sequence[Chunk], weight: int) -> None:
        """Add an accepted update, unless it was added before.

        A masked update is deleted as soon as the blob store has a sum that contains it.
        """
        folding = self._sum(live)
        folding.add(client, chunks, Part(weight, self._codec.rank(live, client)))
        self._newest = live
        if not live.plan.is_secure:
            return
        if len(folding.clients - self._forgotten) >= KEPT_MAX:
            self._is_due.set()
        if self._handing_in is None or self._handing_in.done():
            self._handing_in = asyncio.create_task(self._hand_in(), name=f"masked sum of {live.name}")

    async def take_up(self, live: LiveRun, accepted: Mapping[ClientId, Accepted]) -> None:
        """Fold the stored updates of this share that are not in the sum yet.

        If other replicas took this one for dead and adopted some of its updates, the sum begins anew without them.
        Raises `SumDropped` if another replica has ended the round.
        """
        me = self._services.replicas.id
        mine = {client for client, replica in live.folded_by.items() if replica == me}
        if self._folding is not None and not self._folding.clients <= mine:
            _log.warning(
                "run %s: other replicas took over reports of this replica, which adds up its sum again without these "
                "reports",
                live.name,
            )
            await self.drop()
        new = sorted(mine - self._folding.clients if self._folding else mine)
        if live.plan.is_secure and self._folding is None:
            new = await self._restore(live, new)
        if not new:
            return
        chunks = await self._chunks(live, new)
        for client in new:
            self.fold(live, client, chunks[live.assignment_id(client)], accepted[client].weight)

    async def whole(self, live: LiveRun, closing: Closing) -> Folding | None:
        """The sum of every accepted report, with the shares of other replicas; None while a share is missing."""
        folding = self._sum(live)
        await folding.total()
        missing = closing.accepted.keys() - folding.clients - folding.merged
        if missing:
            for partial in await self._services.rounds.partial_sums(live.round_id):
                if missing.issuperset(partial.clients):
                    await folding.merge(partial)
                    missing -= set(partial.clients)
                elif missing.intersection(partial.clients):  # a merged share was posted again with more in it
                    await self.drop()
                    return None
        return None if missing else folding

    async def _restore(self, live: LiveRun, clients: Sequence[ClientId]) -> list[ClientId]:
        """Begin with the sum that this replica handed in, whose updates are deleted. Returns the clients not in it."""
        me = self._services.replicas.id
        for handed_in in await self._services.rounds.partial_sums(live.round_id):
            if handed_in.replica == me:
                folding = self._sum(live)
                await folding.restore(handed_in)
                return [client for client in clients if client not in folding.clients]
        return list(clients)

    async def _chunks(self, live: LiveRun, clients: Sequence[ClientId]) -> Mapping[AssignmentId, tuple[Chunk, ...]]:
        try:
            return await self._services.uploads.chunks([live.assignment_id(client) for client in clients])
        except UpdateGone as error:
            if isinstance(await self._services.rounds.round_state(live.round_id), Committed | Abandoned):
                raise SumDropped from error
            raise

    def _sum(self, live: LiveRun) -> Folding:
        if self._folding is None:
            self._folding = Folding(self._codec.of(live), self._services.blobs, self._services.worker)
        return self._folding

    # --- handing in ---------------------------------------------------------------------------------------------------

    async def post(self, live: LiveRun) -> None:
        """Put the current sum into the blob store, for the closing replica, or for use after a restart."""
        async with self._posting:
            await self._post(live)

    async def _post(self, live: LiveRun) -> None:
        folding, services, replaced = self._folding, self._services, self._posted_of(live)
        if folding is None or not folding.clients or (replaced and replaced.clients == folding.clients):
            return
        if folding.merged:  # this replica was closing the round, until it was taken for dead
            await self.drop()
            return
        self._n_posted += 1  # a new key, because the earlier file still counts
        key = f"partials/{live.round_id}/{services.replicas.id}.{self._n_posted}"
        with services.blobs.scratch() as path:
            written = await folding.write(path)
            await asyncio.to_thread(services.blobs.put, path, key)
        clients = tuple(sorted(written.clients))
        partial = PartialSum(services.replicas.id, key, written.sha256, clients, written.total_weight)
        if not await services.rounds.post_partial_sum(live, partial):
            await asyncio.to_thread(services.blobs.delete, [key])
            return
        if self._folding is folding:
            self._posted = _Posted(live.round_id, key, written.clients, services.clock.now())
        if replaced is not None:
            await asyncio.to_thread(services.blobs.delete, [replaced.key])
        _log.info("run %s, round %d: stored the partial sum of %d reports", live.name, live.plan.number, len(clients))

    async def _hand_in(self) -> None:
        """Post the current sum and delete the masked updates in it, until every update is deleted.

        It posts when no update is arriving and `HAND_IN_S` have passed since the last hand-in, or when `KEPT_MAX`
        updates wait. After a failure the next update starts it again, and so does the end of the round.
        """
        tried = set[ClientId]()
        try:
            while (folding := self._folding) is not None and not folding.merged and folding.clients != tried:
                tried, live = set(folding.clients), self._newest
                assert live is not None, "`fold` has set it"
                await folding.total()
                n_kept = len(folding.clients - self._forgotten)
                if n_kept < KEPT_MAX and await self._waited(live):
                    tried = set()
                elif folding is self._folding and (folding.clients == tried or n_kept >= KEPT_MAX):
                    await self.post(live)
                    await self._forget_posted(live)
        except (SumDropped, DatabaseAway, SQLAlchemyError, OSError) as error:
            _log.info("could not store a partial sum of masked updates (%s); trying again later", type(error).__name__)

    async def _waited(self, live: LiveRun) -> bool:
        """Wait until the next hand-in is due; returns False if it was due already."""
        posted, now = self._posted_of(live), self._services.clock.now()
        left_s = posted.at + HAND_IN_S - now if posted else 0.0
        if self._is_due.is_set() or left_s <= 0:
            self._is_due.clear()
            return False
        await self._services.clock.wait(self._is_due, min(left_s, HAND_IN_S))
        return True

    def _posted_of(self, live: LiveRun) -> _Posted | None:
        return self._posted if self._posted and self._posted.round_id == live.round_id else None

    async def _forget_posted(self, live: LiveRun) -> None:
        """Delete the masked updates in the sum that was handed in."""
        posted = self._posted_of(live)
        if posted is not None and (new := posted.clients - self._forgotten):
            keys = await self._services.uploads.forget([live.assignment_id(client) for client in sorted(new)])
            await asyncio.to_thread(self._services.blobs.delete, keys)
            self._forgotten = posted.clients

    # --- the end ------------------------------------------------------------------------------------------------------

    async def drop(self) -> None:
        """Drop the sum. It can be made again from the stored updates."""
        folding, self._folding = self._folding, None
        self._is_due.set()
        if folding is not None:
            await folding.discard()

    async def forget(self) -> None:
        """Drop everything, because the attempt is over."""
        self._posted, self._forgotten = None, frozenset()
        await self.drop()

    async def settle(self) -> None:
        """Wait until a hand-in that has begun is done."""
        if self._handing_in is not None:
            self._is_due.set()
            await asyncio.wait([self._handing_in])
