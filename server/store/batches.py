"""Concurrent requests share one transaction or query.

A single request is served at once. While several wait, each batch waits a moment for more. A transaction for ten
requests costs little more than one for a single request, and this cost limits a busy coordinator, not the disk.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from umbel.server.store.outage import DatabaseAway

T = TypeVar("T")
R = TypeVar("R")

GATHER_S = 0.002
BATCH_MAX = 256

Work: TypeAlias = Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]]


class Batches(Generic[T, R]):
    """Collects items into batches. `work` takes a batch and returns for each item a result, or an error to raise.

    If `work` itself raises, it must have changed nothing. Then each half of the batch is tried separately, so that only
    the faulty item fails. Up to `lanes` batches run at a time.
    """

    def __init__(self, work: "Work[T, R]", lanes: int = 1) -> None:
        self._work = work
        self._lanes = lanes
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._running: set[asyncio.Task[None] | None] = set()

    async def do(self, item: T) -> R:
        """The result for this item, which joins the next batch."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._running) < self._lanes:
            self._running.add(asyncio.create_task(self._run()))
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
                await self._settle(batch)
                if self._waiting:  # more came meanwhile
                    await asyncio.sleep(GATHER_S)
        finally:  # no await since the last look at `_waiting`, so that no item is left behind
            self._running.discard(asyncio.current_task())

    async def _settle(self, batch: "list[tuple[T, asyncio.Future[R]]]") -> None:
        try:
            results = await self._work([item for item, _ in batch])
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, DatabaseAway):
                middle = len(batch) // 2
                await self._settle(batch[:middle])
                await self._settle(batch[middle:])
                return
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():  # its request was cancelled
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
