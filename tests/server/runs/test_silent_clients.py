"""A round that has enough reports does not wait for a client that held a request open and is silent now."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import Device, House, LateClock, house, pass_time, run_file, small_state, update_of
from tests.servers.waits import until_told
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.silence import quiet_s

WINDOW_S = 600.0
QUIET_S = quiet_s(WINDOW_S)


async def report(device: Device, assignment: str, layout: Layout) -> str:
    update = update_of(layout, torch.ones(layout.n_values))
    await device.upload(assignment, update)
    return str((await device.report(assignment, update)).json()["outcome"])


async def hold_and_leave(it: House, device: Device, assignment: str) -> None:
    """Hold a status request open, and drop it once it has arrived."""
    asking = asyncio.create_task(device.send("GET", f"/v1/assignments/{assignment}?wait_s=30"))
    driver = await it.driver()

    async def is_held() -> bool:
        return bool(driver.bells.is_heard(device.name))

    await until_told("a held request", is_held)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("asks", [True, False])
def test_a_round_waits_to_the_end_of_its_window_only_for_a_client_that_never_held_a_request(
    tmp_path: Path, asks: bool
) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            layout = await it.begin(run_file(target=3, minimum=2, window_s=WINDOW_S), small_state())
            *quick, dead = devices = await it.devices(3)
            *assignments, its_own = [one["id"] for one in await asyncio.gather(*(d.work(layout) for d in devices))]
            if asks:
                await hold_and_leave(it, dead, its_own)
            for device, assignment in zip(quick, assignments, strict=True):
                assert await report(device, assignment, layout) == "accepted"
            await pass_time(it, clock, QUIET_S - 1.0)
            assert (await it.progress())["live"]["phase"] == "training"
            await pass_time(it, clock, 2.0 if asks else WINDOW_S)
            (record,) = await it.ended(1)
        fates = {one["client"]: one["fate"] for one in record["clients"]}
        assert (record["committed"], record["reported"], fates[dead.name]) == (True, 2, "lost")
        assert record["reason"].endswith(f"{dead.name} fell silent") is asks

    asyncio.run(scenario())


def test_a_client_that_was_silent_is_counted_if_the_round_is_still_open(tmp_path: Path) -> None:
    """Only one other report is in, and two are needed: the round waits, and the assignment stays open."""

    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            layout = await it.begin(run_file(target=2, minimum=2, window_s=WINDOW_S), small_state())
            quick, slow = devices = await it.devices(2)
            first, second = [one["id"] for one in await asyncio.gather(*(d.work(layout) for d in devices))]
            await hold_and_leave(it, slow, second)
            await report(quick, first, layout)
            await pass_time(it, clock, 2 * QUIET_S)
            assert (await slow.send("GET", f"/v1/assignments/{second}")).json()["state"] == "open"
            assert await report(slow, second, layout) == "accepted"
            (record,) = await it.ended(1)
        assert (record["committed"], record["reported"]) == (True, 2)

    asyncio.run(scenario())
