"""A clock for tests of what is remembered over time."""

import asyncio


class ClockByHand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        raise AssertionError("nothing here waits")
