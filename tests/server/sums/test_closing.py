"""A round that another replica has ended, closed by one that has not seen it yet."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import text

from tests.federations.server_device import House, house, run_file, small_state, update_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import Closing, Tick, Training
from umbel.aggregation.types import ClientId
from umbel.server.blobs.blobs import model_key
from umbel.server.runs.assignments import Assignments
from umbel.server.runs.driver import RunDriver
from umbel.server.services import Services
from umbel.server.store.database import Database
from umbel.server.store.stored import LiveRun
from umbel.server.store.uploads import UpdateGone
from umbel.server.sums.closing import Closer
from umbel.server.sums.model_files import ModelFiles
from umbel.server.sums.secure import SecureRounds
from umbel.server.sums.share import Folding, SumDropped
from umbel.server.sums.updates import RoundCodec

pytestmark = pytest.mark.usefixtures("any_database")
LAYOUT = Layout.of_state(small_state())


async def outdated(it: House) -> LiveRun:
    """A run as it was when the first of two reports was in; its only round has ended since."""
    layout = await it.begin(run_file(target=2), small_state())
    devices = await it.devices(2)
    works = await asyncio.gather(*(device.work(layout) for device in devices))
    seen: list[LiveRun] = []
    for device, work in zip(devices, works, strict=True):
        update = update_of(layout, torch.ones(layout.n_values))
        assert (await device.upload(work["id"], update)).status_code == 201
        assert (await device.report(work["id"], update)).json()["outcome"] == "accepted"
        seen.append(it.state.coordinator.drivers["demo"].live)
    assert (await it.ended(1))[0]["committed"]
    assert isinstance(seen[0].state, Training)
    return seen[0]


def closer_of(services: Services) -> Closer:
    codec = RoundCodec(LAYOUT)
    return Closer(services, LAYOUT, codec, SecureRounds(services, Assignments(services, codec).of))


def closing(live: LiveRun) -> LiveRun:
    assert isinstance(live.state, Training)
    state, _ = advance(live.state, Tick(live.state.closes_at))
    assert isinstance(state, Closing)
    return replace(live, state=state)


def test_a_round_that_has_ended_elsewhere_is_not_closed_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            live = await outdated(it)
            closer = closer_of(it.state.services)
            assert await closer.close(closing(live)) is None
            with pytest.raises(SumDropped):
                await closer.share.take_up(live, {})

    asyncio.run(scenario())


async def hand_in(it: House, live: LiveRun, replica: str, clients: Sequence[ClientId]) -> None:
    """Another replica posts its part of the sum, with the updates of these, in the place of what it posted before."""
    services, state, codec = it.state.services, live.state, RoundCodec(LAYOUT)
    assert isinstance(state, Closing)
    folding = Folding(codec.of(live), services.blobs, services.worker)
    names = {client: live.assignment_id(client) for client in clients}
    chunks = await services.uploads.chunks(list(names.values()))
    for client, part in zip(clients, codec.parts(live, ((c, state.accepted[c].weight) for c in clients)), strict=True):
        folding.add(client, chunks[names[client]], part)
    key = f"partials/{live.round_id}/{replica}.{len(clients)}"
    with services.blobs.scratch() as path:
        written = await folding.write(path)
        services.blobs.put(path, key)
    row = {"round": live.round_id, "replica": replica, "key": key, "sha256": written.sha256}
    row |= {"clients": json.dumps(clients), "weight": written.total_weight}
    database = Database(it.settings.database)
    async with database.writing("a partial sum") as tx:
        await tx.execute(text("DELETE FROM partial_sums"))
        columns = "round_id, replica, key, sha256, clients, total_weight"
        values = ":round, :replica, :key, :sha256, :clients, :weight"
        await tx.execute(text(f"INSERT INTO partial_sums ({columns}) VALUES ({values})"), row)
    await database.close()


def test_a_partial_sum_that_is_posted_anew_with_more_in_it_is_merged_in_the_place_of_the_old(tmp_path: Path) -> None:
    """Else the round would wait for ever for the report that is in the new one alone, or count the others twice."""
    d0, d1, d2 = (ClientId(f"d{i}") for i in range(3))

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=4, minimum=3, over_selection=1.0), small_state())
            devices = await it.devices(4)
            works = await asyncio.gather(*(device.work(layout) for device in devices))
            for number, (device, work) in enumerate(zip(devices[:3], works[:3], strict=True)):
                update = update_of(layout, torch.full((layout.n_values,), 1.0 + number))
                assert (await device.upload(work["id"], update)).status_code == 201
                assert (await device.report(work["id"], update)).json()["outcome"] == "accepted"
            services, seen = it.state.services, it.state.coordinator.drivers["demo"].live
            live = closing(replace(seen, folded_by={d0: services.replicas.id, d1: "other", d2: "other"}))
            closer = closer_of(services)
            await hand_in(it, live, "other", [d1])
            assert await closer.close(live) is None, "a report is in nobody's sum yet"
            await hand_in(it, live, "other", [d1, d2])
            assert await closer.close(live) is None, "the sum begins anew"
            made = await closer.close(live)
            assert isinstance(made, ModelFiles)
            with services.blobs.local(model_key(made.published.sha256)) as path:
                change = load_file(path)["embed.weight"] - small_state()["embed.weight"]
            assert torch.allclose(change, torch.tensor(2.0), atol=1e-3), "each report is in the mean once"

    asyncio.run(scenario())


def test_a_run_is_taken_up_though_its_round_ends_elsewhere_at_that_moment(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            driver = RunDriver(it.state.services, await outdated(it), LAYOUT)
            await driver.start()
            await driver.catch_up()
            assert driver.live.state.phase == "committed"
            await driver.close()

    asyncio.run(scenario())


def test_an_update_that_is_lost_while_its_round_is_open_is_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            await device.work(layout)
            services, live = it.state.services, it.state.coordinator.drivers["demo"].live
            lost = replace(live, folded_by={ClientId("d0"): services.replicas.id})
            with pytest.raises(UpdateGone, match=r"of demo\.1\.1\.d0 is not stored any more"):
                await closer_of(services).share.take_up(lost, {})

    asyncio.run(scenario())
