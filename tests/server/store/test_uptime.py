"""Nobody is there to take reports for a while: an open round's window does not count that time."""

import asyncio
from pathlib import Path

import pytest
import torch
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests.federations.server_device import Device, Json, LateClock, house, run_file, small_state, update_of
from tests.servers.postgres import Cluster
from umbel.aggregation.model.layout import Layout
from umbel.server.clock import SystemClock
from umbel.server.settings import Settings
from umbel.server.store.database import Database
from umbel.server.store.replicas import OUTAGE_S, Uptime

WINDOW_S = 20.0
AWAY_S = 100.0  # longer than the window; a signature may be 300 s old
FILE = run_file(target=2, minimum=2, window_s=WINDOW_S)
AWAY = "no coordinator could accept reports"


both_databases = pytest.mark.usefixtures("any_database")


async def date_back(settings: Settings) -> None:
    """PostgreSQL's clock cannot be set: its last sign of life is of `AWAY_S` ago instead."""
    if settings.database_url is not None:
        engine = create_async_engine(settings.database_url, poolclass=NullPool)
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE signs_of_life SET at = at - :away_s"), {"away_s": AWAY_S})
        await engine.dispose()


async def report(device: Device, layout: Layout, assignment: Json) -> str:
    update = update_of(layout, torch.full((layout.n_values,), 0.5))
    assert (await device.upload(assignment["id"], update)).status_code in (201, 409)
    return str((await device.report(assignment["id"], update)).json()["outcome"])


@both_databases
def test_a_round_outlives_a_coordinator_that_was_down_for_longer_than_its_window(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            layout = await it.begin(FILE, small_state())
            devices = await it.devices(2)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            assert await report(devices[0], layout, assignments[0]) == "accepted"
        clock.late_s += AWAY_S
        await date_back(it.settings)
        async with house(tmp_path, clock) as it:
            devices[1].http = it.http
            status = (await devices[1].send("GET", f"/v1/assignments/{assignments[1]['id']}")).json()
            assert status["state"] == "open"
            assert status["window_s"] == pytest.approx(WINDOW_S, abs=5.0)
            assert await report(devices[1], layout, assignments[1]) == "accepted"
            [record] = await it.ended(1)
            assert record["committed"]
            assert record["reported"] == 2
            assert AWAY_S - 1 < record["away_s"] < 2 * AWAY_S

    asyncio.run(scenario())


def test_a_coordinator_that_was_cut_off_itself_sees_it_before_it_refuses_anybody(tmp_path: Path) -> None:
    """A machine that slept, a process that was stopped, a database that was away: its clock has gone on."""

    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            layout = await it.begin(FILE, small_state())
            devices = await it.devices(2)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            clock.late_s += AWAY_S
            for device, assignment in zip(devices, assignments, strict=True):
                assert await report(device, layout, assignment) == "accepted"
            [record] = await it.ended(1)
            assert record["committed"]

    asyncio.run(scenario())


@both_databases
def test_a_short_gap_is_no_outage_and_the_window_closes_when_it_should(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            layout = await it.begin(run_file(target=2, minimum=1, window_s=5.0), small_state())
            devices = await it.devices(2)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            assert await report(devices[0], layout, assignments[0]) == "accepted"
            for _ in range(2):
                clock.late_s += OUTAGE_S - 0.1
                await it.state.services.uptime.sign()
            (await it.driver()).wake()
            [record] = await it.ended(1)
            assert record["committed"]
            assert record["away_s"] == 0

    asyncio.run(scenario())


def test_a_coordinator_whose_clock_is_ahead_takes_nobody_for_away(postgresql: Cluster) -> None:
    async def scenario() -> None:
        database = Database(postgresql.new_database())
        await database.migrate()
        ahead = LateClock()
        ahead.late_s = 8.0
        try:
            await Uptime(database, SystemClock()).sign()
            assert await Uptime(database, ahead).outage() is None
            await Uptime(database, ahead).sign()
            assert await Uptime(database, SystemClock()).outage() is None
        finally:
            await database.close()

    asyncio.run(scenario())


@both_databases
def test_a_coordinator_without_a_run_is_not_said_to_have_been_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            clock.late_s += AWAY_S
            layout = await it.begin(run_file(), small_state())
            [device] = await it.devices(1)
            assert (await device.check_in(layout, wait_s=0.0)).status_code == 200
            assert (await it.http.post("/v1/admin/runs/demo/stop", headers=it.admin)).status_code == 200
            for _ in range(3):
                clock.late_s += 2 * OUTAGE_S
                assert (await device.check_in(layout, wait_s=0.0)).json()["run_status"] == "stopped"

    asyncio.run(scenario())
    assert AWAY not in caplog.text


def test_a_run_that_is_created_late_after_the_last_sign_of_life_saw_no_outage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            clock.late_s += AWAY_S
            await it.state.coordinator.count_outage()  # signs: without a run, a coordinator signs this seldom
            clock.late_s += OUTAGE_S - 0.5
            await it.begin(run_file(), small_state())
            clock.late_s += 1.0
            await it.state.coordinator.count_outage()
            assert await it.state.services.uptime.outage() is None

    asyncio.run(scenario())
    assert AWAY not in caplog.text


def test_a_coordinator_with_a_run_that_was_cut_off_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(run_file(), small_state())
            clock.late_s += AWAY_S
            for _ in range(2):
                await it.state.coordinator.count_outage()

    asyncio.run(scenario())
    assert caplog.text.count(AWAY) == 1
