"""The clock that everything in the coordinator takes as an argument."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """`now`: Unix seconds. `wait`: until an event is set or the timeout has passed."""

    def now(self) -> float: ...

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None: ...


class SystemClock:
    """The wall clock, because signatures have dates and open windows survive a restart."""

    def now(self) -> float:
        return time.time()

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
