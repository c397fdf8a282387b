"""A round that another replica has ended, closed by one that has not seen it yet."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.server_device import House, house, run_file, small_state, update_of
from umbel.aggregation.advance import advance
from umbel.aggregation.layout import Layout
from umbel.aggregation.round import Closing, Tick, Training
from umbel.aggregation.types import ClientId
from umbel.server.assignments import Assignments
from umbel.server.closing import Closer
from umbel.server.driver import RunDriver
from umbel.server.folding import SumDropped
from umbel.server.round_codec import RoundCodec
from umbel.server.secure_rounds import SecureRounds
from umbel.server.services import Services
from umbel.server.stored import LiveRun
from umbel.server.upload_store import UpdateGone

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
    return Closer(services, LAYOUT, RoundCodec(LAYOUT), SecureRounds(services, Assignments(services)))


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
                await closer.take_up(live, {})

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
                await closer_of(services).take_up(lost, {})

    asyncio.run(scenario())
