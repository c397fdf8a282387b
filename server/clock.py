"""Time as an argument: everything in the coordinator that reads a clock or waits takes one of these."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """`now` in Unix seconds; `wait` until an event is set or the time is over."""

    def now(self) -> float: ...

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None: ...


class SystemClock:
    """The machine's wall clock: signatures are dated by it, and open windows outlive a restart by it."""

    def now(self) -> float:
        return time.time()

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
