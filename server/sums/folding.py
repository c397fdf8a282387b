"""This replica's share of the sum of the round under way, fed from stored updates in a worker thread, one at a time.

The stored updates are the truth; this is a sum that can always be made again from them, to the same bits.
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
    """A sum as it was written to a file. `clients`: whose updates are in it, exactly."""

    sha256: str
    total_weight: int
    clients: frozenset[ClientId]


class Folding:
    """One round's accumulator and the folds that are on their way into it.

    `clients`: whose updates were added here; `merged`: whose came with the sums of other replicas. Both may be ahead of
    the sum; who is in that, the worker keeps with it.
    """

    def __init__(self, codec: UpdateReader, blobs: BlobStore, worker: Executor) -> None:
        self.clients: set[ClientId] = set()
        self.merged: set[ClientId] = set()
        self._codec = codec
        self._blobs = blobs
        self._worker = worker
        self._total: IntegerSum | None = None
        self._in_total: set[ClientId] = set()  # changes with the sum, in the worker
        self._pending: list[asyncio.Future[None]] = []
        self._is_discarded = False

    def add(self, client: ClientId, chunks: Sequence[Chunk], part: Part) -> None:
        """Fold a stored update after those added before. One that is in is not added again."""
        if client in self.clients:
            return
        self.clients.add(client)
        loop = asyncio.get_running_loop()
        self._pending.append(loop.run_in_executor(self._worker, self._fold, client, chunks, part))

    async def total(self) -> IntegerSum:
        """The sum once every fold is in; zero if there was none.

        Raises what a fold raised: then build a new `Folding` from what is stored. Raises `SumDropped`.
        """
        await self._settled(*self._pending)
        return self._accumulator()

    async def merge(self, partial: PartialSum) -> None:
        """Add what another replica has folded, a piece at a time. Raises `DamagedSum`, `SumDropped`."""
        loop = asyncio.get_running_loop()
        self._pending.append(loop.run_in_executor(self._worker, self._merge, partial))
        await self._settled(self._pending[-1])
        self.merged |= set(partial.clients)

    async def restore(self, partial: PartialSum) -> None:
        """Begin with what this replica has folded and handed in before. Raises `DamagedSum`, `SumDropped`."""
        await self.merge(partial)
        self.merged -= set(partial.clients)
        self.clients |= set(partial.clients)

    async def write(self, path: Path) -> HandedIn:
        """Write the sum as it is once every fold so far is in to a file, for another replica to merge.

        What is added meanwhile is folded afterwards, and is for the next time. Raises what a fold raised; `SumDropped`.
        """
        pending, loop = tuple(self._pending), asyncio.get_running_loop()
        written = await loop.run_in_executor(self._worker, self._write, path)
        await self._settled(*pending)
        return written

    async def discard(self) -> None:
        """Stop folding and let go of the sum. Whoever waits for it is told so, by `SumDropped`."""
        self._is_discarded = True
        for fold in self._pending:
            fold.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        self._pending.clear()
        self.clients, self.merged = set(), set()
        self._total = None

    async def _settled(self, *pending: asyncio.Future[None]) -> None:
        """Wait for these. A fold that `discard` has cancelled must not pass for the cancellation of who waits here."""
        try:
            await asyncio.gather(*pending)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling() or not self._is_discarded:
                raise
        if self._is_discarded:
            raise SumDropped

    def _accumulator(self) -> IntegerSum:
        """Allocated when first needed: int64, twice the model."""
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
            raise DamagedSum(f"the partial sum {partial.key} is not what replica {partial.replica} has written")
        self._in_total.update(partial.clients)

    def _write(self, path: Path) -> HandedIn:
        """In the worker, as folds are: no fold is half in the sum."""
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
    """The sum was let go of while someone waited for it: its round is over, or it is to be made anew."""


class DamagedSum(OSError):
    """A sum is not what it should be: a part of it was changed in store. Fold the updates again."""


def _read(blobs: BlobStore, key: str, hashed: Callable[[memoryview], None]) -> Iterator[Tensor]:
    """The integers of a partial sum, in pieces. Each piece is overwritten by the next."""
    buffer = memoryview(bytearray(8 * PIECE_VALUES))
    with blobs.open(key) as file:
        while n_bytes := fill(file, buffer):
            hashed(buffer[:n_bytes])
            yield torch.frombuffer(buffer[:n_bytes], dtype=torch.int64)
