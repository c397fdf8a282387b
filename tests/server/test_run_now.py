"""What operators see of a round under way is read once for all of them, and not oftener than it can be looked at."""

import asyncio
import time
from pathlib import Path

import torch

from tests.server_device import Device, House, Json, UntimedClock, house, run_file, small_state, update_of
from tests.waits import LIMIT_S
from umbel.aggregation.layout import Layout
from umbel.server.driver import PROGRESS_BELL

LAYOUT = Layout.of_state(small_state())


def count_readings(it: House) -> list[float]:
    """When the round's clients have been read from now on."""
    rounds, readings = it.state.services.rounds, list[float]()
    read = rounds.assignments

    async def counted(round_id: int) -> object:
        readings.append(time.monotonic())
        return await read(round_id)

    rounds.assignments = counted
    return readings


async def open_round(it: House) -> list[tuple[Device, Json]]:
    """A round of three clients that waits for all of them."""
    await it.begin(run_file(target=3, minimum=3), small_state())
    devices = await it.devices(3)
    return list(zip(devices, await asyncio.gather(*(device.work(LAYOUT) for device in devices)), strict=True))


def n_reported(progress: Json) -> int:
    return sum(client["fate"] == "accepted" for client in progress["live"]["clients"])


def test_many_who_watch_share_a_reading(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await open_round(it)
            readings = count_readings(it)
            seen = await asyncio.gather(*(it.progress() for _ in range(30)))
            assert all(len(one["live"]["clients"]) == 3 for one in seen)
            assert len(readings) <= 10

    asyncio.run(scenario())


def test_a_round_that_changes_all_the_time_is_read_twice_a_second_and_its_last_state_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, UntimedClock()) as it:
            cohort = await open_round(it)
            readings = count_readings(it)
            driver = await it.driver()
            update = update_of(LAYOUT, torch.ones(LAYOUT.n_values))

            async def changes() -> None:
                for step in range(100):
                    driver.bells.ring((PROGRESS_BELL,))
                    if step in (50, 99):
                        device, assignment = cohort[step // 99]
                        await device.upload(assignment["id"], update)
                        await device.report(assignment["id"], update)
                    await asyncio.sleep(0.02)

            async def watch() -> None:
                while n_reported(await it.progress(wait_s=20.0)) < 2:
                    pass

            began = time.monotonic()
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(watch(), watch(), watch(), changes())
            took_s = time.monotonic() - began
            assert len(readings) <= 2 * 2 * (took_s + 1), "at most two for each look of all three"

    asyncio.run(scenario())


def test_a_round_that_ends_is_told_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, UntimedClock()) as it, asyncio.timeout(LIMIT_S):
            await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            held = asyncio.create_task(it.progress(wait_s=20.0))
            await device.take_part(LAYOUT, torch.ones(LAYOUT.n_values))
            progress = await held
            while not progress["ended"]:
                progress = await it.progress(wait_s=20.0)
            assert progress["ended"][0]["committed"]

    asyncio.run(scenario())
