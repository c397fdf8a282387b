"""Requests that come together share one piece of work, and only the guilty one fails."""

import asyncio
from collections.abc import Sequence

import pytest

from umbel.server.store.batches import Batches
from umbel.server.store.outage import DatabaseAway


def test_what_comes_while_a_batch_is_worked_on_shares_the_next() -> None:
    seen: list[Sequence[int]] = []

    async def double(items: Sequence[int]) -> Sequence[int]:
        seen.append(items)
        await asyncio.sleep(0.01)
        return [2 * item for item in items]

    async def scenario() -> None:
        batches: Batches[int, int] = Batches(double)
        assert await asyncio.gather(*(batches.do(i) for i in range(10))) == [2 * i for i in range(10)]
        assert await batches.do(21) == 42  # after an idle time the work begins anew
        assert len(seen) < 5

    asyncio.run(scenario())


def test_of_a_batch_that_fails_only_the_guilty_item_is_told() -> None:
    async def refuse_seven(items: Sequence[int]) -> Sequence[int]:
        if 7 in items:
            raise ValueError("seven")
        return items

    async def scenario() -> None:
        batches: Batches[int, int] = Batches(refuse_seven)
        results = await asyncio.gather(*(batches.do(i) for i in range(20)), return_exceptions=True)
        assert [i for i, result in enumerate(results) if isinstance(result, ValueError)] == [7]

    asyncio.run(scenario())


def test_an_outage_is_told_to_everyone_in_the_batch_and_the_next_is_served() -> None:
    is_away = True

    async def echo(items: Sequence[int]) -> Sequence[int]:
        if is_away:
            raise DatabaseAway("it does not answer")
        return items

    async def scenario() -> None:
        nonlocal is_away
        batches: Batches[int, int] = Batches(echo)
        async with asyncio.timeout(5.0):
            told = await asyncio.gather(*(batches.do(i) for i in range(5)), return_exceptions=True)
            assert [type(one) for one in told] == [DatabaseAway] * 5
            is_away = False
            assert await batches.do(7) == 7

    asyncio.run(scenario())


def test_no_item_is_left_behind_however_they_come() -> None:
    async def echo(items: Sequence[int]) -> Sequence[int]:
        await asyncio.sleep(0)
        return items

    async def scenario() -> None:
        batches: Batches[int, int] = Batches(echo, lanes=2)

        async def ask(i: int) -> int:
            for _ in range(i % 7):
                await asyncio.sleep(0)
            return await batches.do(i)

        for _ in range(20):
            async with asyncio.timeout(5.0):
                assert await asyncio.gather(*(ask(i) for i in range(50))) == list(range(50))

    asyncio.run(scenario())


def test_a_result_that_is_an_error_is_raised_to_its_own_item() -> None:
    async def judge(items: Sequence[int]) -> Sequence[int | Exception]:
        return [KeyError(item) if item % 2 else item for item in items]

    async def scenario() -> None:
        batches: Batches[int, int] = Batches(judge)
        assert await batches.do(2) == 2
        with pytest.raises(KeyError):
            await batches.do(3)

    asyncio.run(scenario())
