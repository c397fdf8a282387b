"""A large fleet is told when to come back; a small one waits on its connections."""

import asyncio
from pathlib import Path

from tests.federations.server_device import House, house, run_file, small_state
from umbel.aggregation.types import ClientId, RunId
from umbel.server.devices.waiting import FLEET_HELD_MAX
from umbel.server.store.waiters import Waiting


async def populate(it: House, count: int) -> None:
    """Note that so many clients were here a minute ago."""
    waiters, now = it.state.services.waiters, it.state.services.clock.now()
    for i in range(count):
        waiters.note(Waiting(RunId("demo"), ClientId(f"phone-{i}"), 10, "", now - 60.0, now - 30.0))
    await waiters.settle()
    driver = it.state.coordinator.drivers["demo"]
    driver.pacing._looked_at = float("-inf")  # or the count would be the one of ten seconds ago
    await driver.pacing.look()


async def retry_after_s(tmp_path: Path, population: int, wait_s: float) -> list[float]:
    """What clients without work are told while a round of 600 s is open."""
    async with house(tmp_path) as it:
        layout = await it.begin(run_file(target=1, window_s=600), small_state())
        devices = await it.devices(9)
        await devices[0].work(layout)
        await populate(it, population)
        answers = [await device.check_in(layout, wait_s) for device in devices[1:]]
        assert all(answer.json()["assignment"] is None for answer in answers)
        return [answer.json()["retry_after_s"] for answer in answers]


def test_a_large_fleet_is_sent_away_at_once_and_spread(tmp_path: Path) -> None:
    away_s = asyncio.run(asyncio.wait_for(retry_after_s(tmp_path, 50_000, wait_s=25.0), 60.0))
    assert len(set(away_s)) == len(away_s), "each at a moment of its own"
    assert max(away_s) > 50_000 / 300 / 2, "so that no more than check_ins_per_s_max come in a second"


def test_a_small_fleet_is_held_and_comes_back_at_once(tmp_path: Path) -> None:
    assert asyncio.run(retry_after_s(tmp_path, FLEET_HELD_MAX - 100, wait_s=0.05)) == [1.0] * 8
