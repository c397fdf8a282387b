"""One chain of audit bundles, whoever of several replicas ends an attempt, evaluates, rolls back, or dies."""

import asyncio
from pathlib import Path

from tests.federations.audit_house import bundles, operating
from tests.federations.lifecycle_house import lifecycle_run, measure, obeyed, train
from tests.federations.server_device import house, houses_over, small_state
from tests.servers.postgres import Cluster
from umbel.aggregation.model.layout import Layout
from umbel.client.cli.audit import audit_run, replay_run

LAYOUT = Layout.of_state(small_state())
MORE = '[evaluation]\nevery = 1\nclients = 2\n[retention]\nupdates = "all"\n'


def test_evaluations_and_rollbacks_at_two_replicas_make_one_chain(tmp_path: Path, postgresql: Cluster) -> None:
    url = postgresql.new_database()
    key = tmp_path / "shared.key"

    async def scenario() -> None:
        async with (
            house(tmp_path, audit_key_file=key) as one,
            house(tmp_path, audit_key_file=key) as other,
        ):
            await one.begin(lifecycle_run(MORE, count=3), small_state())
            devices = await one.devices(3)
            for number, device in enumerate(devices):
                device.http = (one, other, one)[number].http
            for _ in range(2):
                await train(devices[0], LAYOUT, 0.5)
                tasks = await asyncio.gather(*(device.work(LAYOUT) for device in devices[1:]))
                for device, task in zip(devices[1:], tasks, strict=True):
                    assert (await measure(device, task, 10, loss=1.0)).json()["outcome"] == "accepted"
            await other.ended(4)
            await obeyed(other, "rollback", to=1)
            await train(devices[1], LAYOUT, 0.25)
            await one.ended(6)
            lines = await bundles(one)
            assert lines == await bundles(other)
            tasks_of = [line["bundle"]["facts"].get("plan", {}).get("task") for line in lines[:6]]
            assert tasks_of == [None, "training", "evaluation", "training", "evaluation", "training"]
            assert lines[5]["bundle"]["facts"]["rolled_back_to"] == 1
            await operating(one, lambda operator: audit_run(operator, "demo"))
            await operating(other, lambda operator: replay_run(operator, "demo", all_=True))

    with houses_over(lambda _: url):
        asyncio.run(scenario())
