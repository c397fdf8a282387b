"""Requests that come together share one piece of work: one transaction, one query, one trip to another thread.

A lone request is served at once. While several come at a time, each batch waits a moment for more: a transaction for
ten costs little more than one for one, and that cost, not the disk, is what limits a busy coordinator.
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
    """`work` takes a batch and returns, in its order, what became of each item: a result, or what to raise.

    If it raises instead, nothing of the batch may have happened, and each half is tried by itself, so that only the
    guilty item fails. Up to `lanes` batches are worked on at a time.
    """

    def __init__(self, work: "Work[T, R]", lanes: int = 1) -> None:
        self._work = work
        self._lanes = lanes
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._running: set[asyncio.Task[None] | None] = set()

    async def do(self, item: T) -> R:
        """Have this item worked on in the next batch."""
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
                if self._waiting:  # more came meanwhile: there is a crowd
                    await asyncio.sleep(GATHER_S)
        finally:  # in the same step as the last look at what waits, so that none is left behind
            self._running.discard(asyncio.current_task())

    async def _settle(self, batch: "list[tuple[T, asyncio.Future[R]]]") -> None:
        try:
            results = await self._work([item for item, _ in batch])
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, DatabaseAway):  # which is no item's fault
                middle = len(batch) // 2
                await self._settle(batch[:middle])
                await self._settle(batch[middle:])
                return
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():  # a request that was cancelled waits no more
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
