"""A coordinator keeps little of a run that is over, and answers for it as before."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import House, Json, LateClock, house, run_file, small_state
from umbel.aggregation.model.layout import Layout

LAYOUT = Layout.of_state(small_state())


async def runs_driven(it: House) -> set[str]:
    """The runs that have a driver, after a look."""
    await it.state.coordinator._look()
    return set(it.state.coordinator.drivers)


async def views(it: House) -> list[Json]:
    return list((await it.http.get("/v1/admin/runs", headers=it.admin)).json())


@pytest.mark.usefixtures("any_database")
def test_a_run_that_nobody_asks_for_after_its_end_is_a_view_and_is_opened_when_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            await device.take_part(LAYOUT, torch.ones(LAYOUT.n_values))
            [record] = await it.ended(1)
            before = await views(it)
            assert await runs_driven(it) == {"demo"}, "it was asked for a moment ago"
            clock.late_s = 601.0
            assert await runs_driven(it) == set()
            assert await views(it) == before
            assert before[0]["status"] == "finished"
            clock.late_s = 0.0
            assert (await device.check_in(LAYOUT)).json()["run_status"] == "finished"
            progress = await it.progress()
            assert (progress["ended"], progress["run"]) == ([record], before[0])
            assert await views(it) == before
            clock.late_s = 601.0
            assert await runs_driven(it) == set()
            clock.late_s = 0.0
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
            assert await runs_driven(it) == {"first", "third"}
            assert await views(it) == before
            answer = await it.http.get("/v1/admin/runs/second", headers=it.admin)
            assert answer.json() == before[1]

    asyncio.run(scenario())
