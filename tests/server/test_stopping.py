"""A background task is stopped, also if a library swallows its cancellation."""

import asyncio

import pytest

from umbel.server.stopping import stopped


def test_a_task_that_swallows_its_cancellation_is_cancelled_again() -> None:
    async def deaf(n_swallowed: int) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if n_swallowed == 0:
                    raise
                n_swallowed -= 1

    async def scenario() -> None:
        for n_swallowed in (0, 1, 2):
            task = asyncio.create_task(deaf(n_swallowed))
            await asyncio.sleep(0)
            await stopped(task, again_s=0.01)
            assert task.cancelled()

    asyncio.run(scenario())


def test_what_a_task_has_raised_is_raised() -> None:
    async def broken() -> None:
        raise ValueError("its disk is full")

    async def scenario() -> None:
        task = asyncio.create_task(broken())
        await asyncio.sleep(0)
        await stopped(task)

    with pytest.raises(ValueError, match="its disk is full"):
        asyncio.run(scenario())
