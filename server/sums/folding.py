"""A sum of stored updates in memory. A worker thread folds them in, one at a time.

The same sum, to the bit, can always be made again from the stored updates.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from umbel.aggregation.codec.update_codec import Part, UpdateReader
from umbel.aggregation.model.layout import PIECE_VALUES
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.grid import IntegerSum
from umbel.server.blobs.blobs import BlobStore
from umbel.server.store.stored import Chunk, PartialSum
from umbel.server.sums.updates import fill, integers


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
