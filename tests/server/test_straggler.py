"""Flower's case of one slow client: its job takes 40 s, the window is 15 s, and it does not listen when it is released.

Rounds that come while it is at work do not wait for it: they begin without it once a tenth of the window has passed.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.server_device import Device, House, Json, house, run_file, small_state, update_of
from umbel.aggregation.layout import Layout
from umbel.aggregation.types import RoundPlan

N_CLIENTS = 5
_PATIENCE_S = vars(RoundPlan)["patience_s"]


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("window_s", "job_s"), [(1.5, 4.0), pytest.param(15.0, 40.0, marks=pytest.mark.nightly)], ids=["a tenth", "full"]
)
def test_one_straggler_costs_one_window_once(
    window_s: float, job_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundPlan, "patience_s", property(_until_all_are_there_at_first))
    records, late = asyncio.run(_three_rounds(tmp_path, window_s, job_s))
    print("seconds a round took:", [round(one["wall_s"], 2) for one in records])
    assert all(one["committed"] for one in records)
    assert [one["reported"] for one in records] == [N_CLIENTS - 1] * 3
    assert window_s <= records[0]["wall_s"] < window_s + 1.0 + window_s / 10
    assert all(one["selected"] == N_CLIENTS - 1 and one["wall_s"] < window_s / 2 for one in records[1:])
    assert late["outcome"] == "late"


def _until_all_are_there_at_first(plan: RoundPlan) -> float:
    """On a busy machine a tenth of the short window is over before five clients have checked in for the first time."""
    return 60.0 if plan.number == 1 else float(_PATIENCE_S.fget(plan))


async def _three_rounds(data: Path, window_s: float, job_s: float) -> tuple[list[Json], Json]:
    async with house(data) as it:
        text = run_file(count=3, target=N_CLIENTS, minimum=N_CLIENTS - 1, window_s=window_s)
        layout = await it.begin(text, small_state())
        *quick, straggler = await it.devices(N_CLIENTS)
        slow = asyncio.create_task(_work_for(straggler, layout, job_s))
        await asyncio.gather(*(_take_part(it, device, layout) for device in quick))
        return await it.ended(3), await slow


async def _take_part(it: House, device: Device, layout: Layout) -> None:
    while (await it.progress())["run"]["status"] == "running":
        answer = (await device.check_in(layout, wait_s=5.0)).json()
        if assignment := answer["assignment"]:
            await _report(device, layout, assignment)


async def _work_for(device: Device, layout: Layout, job_s: float) -> Json:
    """Train for so long and hear nothing meanwhile; what the report is told."""
    assignment = await device.work(layout)
    await asyncio.sleep(job_s)
    update = update_of(layout, torch.ones(layout.n_values))
    return dict((await device.report(assignment["id"], update)).json())


async def _report(device: Device, layout: Layout, assignment: Json) -> None:
    update = update_of(layout, torch.ones(layout.n_values))
    assert (await device.upload(assignment["id"], update)).status_code == 201
    assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
