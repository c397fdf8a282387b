"""A coordinator keeps little of a run that is over, and answers for it as before."""

import asyncio
import time
from pathlib import Path

import pytest
import torch

from tests.server_device import House, Json, house, run_file, small_state
from umbel.aggregation.layout import Layout

LAYOUT = Layout.of_state(small_state())


class Wound:
    """The machine's clock, some seconds ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return time.time() + self.ahead_s

    async def wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return


async def let_go(it: House) -> None:
    """Wait until no driver is left."""
    deadline = time.monotonic() + 10
    while it.state.coordinator.drivers:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def views(it: House) -> list[Json]:
    return list((await it.http.get("/v1/admin/runs", headers=it.admin)).json())


@pytest.mark.usefixtures("any_database")
def test_a_run_that_nobody_asks_for_after_its_end_is_a_view_and_is_opened_when_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Wound()
        async with house(tmp_path, clock) as it:
            await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            await device.take_part(LAYOUT, torch.ones(LAYOUT.n_values))
            [record] = await it.ended(1)
            before = await views(it)
            await asyncio.sleep(1.2)  # more than a look, and yet it is kept: it was asked for a moment ago
            assert it.state.coordinator.drivers
            clock.ahead_s = 601.0
            await let_go(it)
            assert await views(it) == before
            assert before[0]["status"] == "finished"
            clock.ahead_s = 0.0
            assert (await device.check_in(LAYOUT)).json()["run_status"] == "finished"
            progress = await it.progress()
            assert (progress["ended"], progress["run"]) == ([record], before[0])
            assert await views(it) == before
            clock.ahead_s = 601.0
            await let_go(it)
            clock.ahead_s = 0.0
            answer = await device.report("demo.1.1.d0", b"", update_sha256="0" * 64)
            assert answer.json()["outcome"] == "accepted"

    asyncio.run(scenario())


def test_a_run_that_was_over_before_the_start_is_a_view(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            model = await it.put_model(small_state())
            for name in ("first", "second", "third"):
                text = run_file(target=1).replace('"demo"', f'"{name}"')
                assert (await it.put_run(text, model, name)).status_code == 201
            stop = "/v1/admin/runs/second/stop"
            assert (await it.http.post(stop, json={"reason": "enough"}, headers=it.admin)).status_code == 200
            before = await views(it)
        async with house(tmp_path) as it:
            assert set(it.state.coordinator.drivers) == {"first", "third"}
            assert await views(it) == before
            answer = await it.http.get("/v1/admin/runs/second", headers=it.admin)
            assert answer.json() == before[1]

    asyncio.run(scenario())
