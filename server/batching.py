"""Many small writes as few large ones: what comes while one transaction is being written shares the next."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Batcher(Generic[T]):
    """Hands items to `write` in batches, one batch at a time, in the order in which they came."""

    def __init__(self, write: Callable[[Sequence[T]], Awaitable[None]]) -> None:
        self._write = write
        self._next: list[tuple[T, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    def add(self, item: T) -> "asyncio.Future[None]":
        """Done when the item's batch is written; raises what the write raised, if anyone asks."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._next.append((item, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return done

    async def settle(self) -> None:
        """Wait until everything is written."""
        while self._writing is not None and not self._writing.done():
            await self._writing

    async def _write_all(self) -> None:
        while self._next:
            batch, self._next = self._next, []
            try:
                await self._write([item for item, _ in batch])
            except Exception as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
                        done.exception()  # nobody has to ask
            else:
                for _, done in batch:
                    if not done.done():
                        done.set_result(None)
