"""What an operator orders of one replica holds for all of them, and survives whoever was asked."""

import asyncio
from pathlib import Path

import pytest

from tests.federations.lifecycle_house import lifecycle_run, measure, obeyed, train, versions
from tests.federations.server_device import Device, House, Json, house, houses_over, small_state
from tests.servers.postgres import Cluster
from tests.servers.waits import until_told
from umbel.aggregation.model.layout import Layout
from umbel.server.sums.model_removal import sweep_models

LAYOUT = Layout.of_state(small_state())


async def paused(device: Device) -> Json:
    """What this replica tells a client, once it has heard of the pause."""

    async def ask() -> Json | None:
        told = (await device.check_in(LAYOUT, wait_s=0.1)).json()
        return told if told["run_status"] == "paused" else None

    return await until_told("a pause at the other replica", ask)


async def versioned(it: House, count: int) -> bool:
    """Whether there are so many versions."""
    return len(await versions(it)) >= count


def test_a_pause_a_rollback_and_a_resume_at_one_replica_hold_at_the_other(tmp_path: Path, postgresql: Cluster) -> None:
    url = postgresql.new_database()

    async def scenario() -> None:
        async with house(tmp_path) as one, house(tmp_path) as other:
            await one.begin(lifecycle_run(), small_state())
            [device] = await one.devices(1)
            device.http = other.http
            await train(device, LAYOUT, 0.5)
            await until_told("version 1", lambda: versioned(one, 2))
            await obeyed(one, "pause", reason="both of you")
            assert "both of you" in (await paused(device))["reason"]
            view = await obeyed(other, "rollback", to=0)
            assert (view["status"], view["model"]["version"]) == ("paused", 2)
            held = asyncio.create_task(device.check_in(LAYOUT, wait_s=20.0))
            await obeyed(one, "resume")
            assignment = (await held).json()["assignment"]
            assert (assignment["id"], assignment["model"]["version"]) == ("demo.2.2.d0", 2)
            for it in (one, other):
                assert [one["rolled_back_to"] for one in await versions(it)] == [None, None, 0]

    with houses_over(lambda _: url):
        asyncio.run(scenario())


@pytest.mark.slow
def test_replicas_evaluate_together_and_sweep_one_at_a_time(tmp_path: Path, postgresql: Cluster) -> None:
    url = postgresql.new_database()
    more = "[evaluation]\nevery = 1\nclients = 2\n[retention]\nversions = 1\n"

    async def scenario() -> None:
        async with house(tmp_path) as one, house(tmp_path) as other:
            await one.begin(lifecycle_run(more, count=2), small_state())
            devices = await one.devices(3)
            for number, device in enumerate(devices):
                device.http = (one, other, one)[number].http
            for _ in range(2):
                await train(devices[0], LAYOUT, 0.5)
                tasks = await asyncio.gather(*(device.work(LAYOUT) for device in devices[1:]))
                for device, task in zip(devices[1:], tasks, strict=True):
                    assert task["task"] == "evaluation"
                    assert (await measure(device, task, 10, loss=1.0)).json()["outcome"] == "accepted"
            ended = await other.ended(4)
            assert [(record["task"], record["committed"], record["reported"]) for record in ended] == [
                ("training", True, 1),
                ("evaluation", True, 2),
            ] * 2
            await asyncio.gather(*(sweep_models(it.state.services, kept_s=0.0) for it in (one, other)))
            found = await versions(one)
            assert [record["deleted_at"] is None for record in found] == [True, False, True]
            models = {path.name for path in (tmp_path / "blobs" / "models").iterdir()}
            assert found[1]["sha256"] not in models
            assert {found[0]["sha256"], found[2]["sha256"]} <= models

    with houses_over(lambda _: url):
        asyncio.run(scenario())
