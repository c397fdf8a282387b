"""Flower's case of one slow client: its job takes longer than the window, and it does not listen when it is released.

Rounds that come while it is at work do not wait for it: they begin without it once a tenth of the window has passed.
The clock goes on when the test says so.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import (
    Device,
    House,
    Json,
    LateClock,
    house,
    pass_time,
    run_file,
    small_state,
    update_of,
)
from tests.servers.waits import until_told
from umbel.aggregation.model.layout import Layout

N_CLIENTS = 5
WINDOW_S = 60.0
PATIENCE_S = 6.0
JOB_S = 160.0


def test_one_straggler_costs_one_window_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            text = run_file(count=3, target=N_CLIENTS, minimum=N_CLIENTS - 1, window_s=WINDOW_S)
            layout = await it.begin(text, small_state())
            *quick, straggler = devices = await it.devices(N_CLIENTS)
            *assignments, its_own = await asyncio.gather(*(device.work(layout) for device in devices))
            await report(quick, assignments, layout)
            await pass_time(it, clock, WINDOW_S + 0.1)
            await it.ended(1)
            for number in (2, 3):
                working = [asyncio.create_task(device.work(layout)) for device in quick]
                await until_told("the others waiting", lambda: all_wait(it))
                await pass_time(it, clock, PATIENCE_S + 0.1)
                await report(quick, await asyncio.gather(*working), layout)
                await it.ended(number)
            await pass_time(it, clock, JOB_S - clock.late_s)
            late = (await straggler.report(its_own["id"], update_of(layout, torch.ones(layout.n_values)))).json()
            records = await it.ended(3)
        assert all(one["committed"] for one in records)
        assert [one["reported"] for one in records] == [N_CLIENTS - 1] * 3
        assert [one["selected"] for one in records] == [N_CLIENTS, N_CLIENTS - 1, N_CLIENTS - 1]
        assert [one["wall_s"] for one in records] == [pytest.approx(WINDOW_S, abs=1.0), 0.0, 0.0]
        assert late["outcome"] == "late"

    asyncio.run(scenario())


async def all_wait(it: House) -> bool:
    live = (await it.progress())["live"]
    return live is not None and live["waiting"] == N_CLIENTS - 1


async def report(devices: list[Device], assignments: list[Json], layout: Layout) -> None:
    for device, assignment in zip(devices, assignments, strict=True):
        update = update_of(layout, torch.ones(layout.n_values))
        assert (await device.upload(assignment["id"], update)).status_code == 201
        assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
