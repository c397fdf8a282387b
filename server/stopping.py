"""How a background task of the coordinator is stopped."""

import asyncio


async def stopped(task: asyncio.Task[None], again_s: float = 5.0) -> None:
    """Cancel a task, and wait for its end. Raises what it raises.

    It is cancelled again if it goes on for `again_s`: `asyncio.wait_for` of Python 3.11, in the driver of PostgreSQL,
    swallows a cancellation that comes together with its result.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=again_s)
    if not task.cancelled():
        task.result()
