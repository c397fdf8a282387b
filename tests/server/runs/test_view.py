"""What operators see of a round under way is read once for all of them, and not oftener than it can be looked at."""

import asyncio
import time
from pathlib import Path

import torch

from tests.federations.server_device import Device, House, Json, UntimedClock, house, run_file, small_state, update_of
from tests.servers.waits import LIMIT_S
from umbel.aggregation.model.layout import Layout
from umbel.server.runs.memory import LOOK_S

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


def test_many_who_ask_at_once_share_two_readings(tmp_path: Path) -> None:
    """The one that the first of them begins, and one that begins after the others have asked."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            await open_round(it)
            readings = count_readings(it)
            now = (await it.driver()).now
            seen = await asyncio.gather(*(now.look() for _ in range(30)))
            assert all(one is not None and len(one.clients) == 3 for one in seen)
            assert len(readings) == 2

    asyncio.run(scenario())


def test_of_a_round_that_changes_all_the_time_each_sees_two_states_a_second_and_the_last(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, UntimedClock()) as it:
            cohort = await open_round(it)
            readings = count_readings(it)
            driver = await it.driver()
            update = update_of(LAYOUT, torch.ones(LAYOUT.n_values))

            async def changes() -> None:
                for step in range(100):
                    driver.now.changed()
                    if step in (50, 99):
                        device, assignment = cohort[step // 99]
                        await device.upload(assignment["id"], update)
                        await device.report(assignment["id"], update)
                    await asyncio.sleep(0.02)

            async def watch() -> None:
                progress = await it.progress()
                while n_reported(progress) < 2:
                    progress = await it.progress(wait_s=20.0, mark=progress["mark"])

            began = time.monotonic()
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(watch(), watch(), watch(), changes())
            looks = (time.monotonic() - began) / LOOK_S + 2  # of each of the three
            assert len(readings) <= 3 * looks, "not one for each change"

    asyncio.run(scenario())


def test_a_change_between_two_requests_is_told_at_once(tmp_path: Path) -> None:
    """With the mark of the last answer. Of another replica's it is not known what has changed since."""

    async def scenario() -> None:
        async with house(tmp_path, UntimedClock()) as it, asyncio.timeout(LIMIT_S):
            cohort = await open_round(it)
            before = await it.progress()
            device, assignment = cohort[0]
            update = update_of(LAYOUT, torch.ones(LAYOUT.n_values))
            await device.upload(assignment["id"], update)
            await device.report(assignment["id"], update)
            assert n_reported(await it.progress(wait_s=20.0, mark=before["mark"])) == 1
            now = (await it.driver()).now
            assert now.has_changed_since(before["mark"])
            assert not now.has_changed_since(now.mark)
            assert not now.has_changed_since("")
            assert not now.has_changed_since("0123abcd.0")

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
