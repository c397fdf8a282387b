"""Whether the newest model has the work of an assignment in it: through abandoned attempts, rollbacks and restarts."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.lifecycle_house import lifecycle_run, obeyed, train
from tests.federations.server_device import (
    Device,
    House,
    Json,
    LateClock,
    house,
    pass_time,
    problem,
    run_file,
    small_state,
    update_of,
)
from umbel.aggregation.model.layout import Layout

pytestmark = pytest.mark.usefixtures("any_database")
LAYOUT = Layout.of_state(small_state())


async def counts(device: Device, assignment: str) -> bool:
    answer = await device.send("GET", f"/v1/assignments/{assignment}/counts")
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["counts"])


async def all_counts(device: Device, *assignments: Json) -> list[bool]:
    return [await counts(device, one["id"]) for one in assignments]


async def begun(it: House) -> Device:
    await it.begin(lifecycle_run(), small_state())
    [device] = await it.devices(1)
    return device


def test_work_counts_once_its_round_has_made_a_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            device = await begun(it)
            first = await device.work(LAYOUT)
            assert not await counts(device, first["id"])
            await train(device, LAYOUT, 0.5)
            await it.ended(1)
            assert await counts(device, first["id"])
        async with house(tmp_path) as it:  # after a restart
            device.http = it.http
            assert await counts(device, first["id"])

    asyncio.run(scenario())


def test_a_rollback_takes_work_out_of_the_model_and_a_second_one_brings_it_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            device = await begun(it)
            made = [await train(device, LAYOUT, value) for value in (0.5, 1.0, 2.0)]
            await it.ended(3)
            assert await all_counts(device, *made) == [True, True, True]
            await obeyed(it, "rollback", to=1)
            assert await all_counts(device, *made) == [True, False, False]
            made.append(await train(device, LAYOUT, 3.0))
            await it.ended(5)
            assert await all_counts(device, *made) == [True, False, False, True]
            await obeyed(it, "rollback", to=2)
            assert await all_counts(device, *made) == [True, True, False, False]
            await obeyed(it, "rollback", to=0)
            assert not any(await all_counts(device, *made))

    asyncio.run(scenario())


def test_the_report_of_an_abandoned_attempt_does_not_count(tmp_path: Path) -> None:
    """It was accepted, and the attempt that made the model asked the client again, whose new work counts."""

    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            layout = await it.begin(run_file(target=2, minimum=2, window_s=600), small_state())
            devices = await it.devices(2)
            update = update_of(layout, torch.ones(layout.n_values))

            async def work(device: Device) -> str:
                assignment = await device.work(layout)
                await device.upload(assignment["id"], update)
                assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
                return str(assignment["id"])

            reporting, absent = devices
            abandoned, _ = await asyncio.gather(work(reporting), absent.work(layout))
            await pass_time(it, clock, 601)
            [record] = await it.ended(1)
            assert not record["committed"]
            again, _ = await asyncio.gather(work(reporting), work(absent))
            assert (await it.ended(2))[1]["committed"]
            assert [await counts(reporting, one) for one in (abandoned, again)] == [False, True]

    asyncio.run(scenario())


def test_a_client_learns_nothing_of_the_work_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(), small_state())
            mine, other = await it.devices(2)
            assignment = await train(mine, LAYOUT, 0.5)
            await it.ended(1)
            for path in (assignment["id"], "demo.9.1.d1"):
                assert problem(await other.send("GET", f"/v1/assignments/{path}/counts")) == "unknown-assignment"

    asyncio.run(scenario())
