"""Refusals that the operator should hear of: the newest of each client, a bounded number of them, for a while."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import func, select

from tests.federations.server_device import House, house, run_file, small_state
from umbel.aggregation.run.records import TurnedAway
from umbel.aggregation.types import RunId
from umbel.server.devices.clients import KEPT_MAX, SHOWN_MAX
from umbel.server.store import tables
from umbel.server.store.database import Database

pytestmark = pytest.mark.usefixtures("any_database")

RUN = RunId("demo")


async def kept(it: House) -> int:
    """How many rows there are."""
    database = Database(it.settings.database)
    try:
        async with database.reading() as tx:
            return int((await tx.execute(select(func.count()).select_from(tables.TurnedAwayRow))).scalar_one())
    finally:
        await database.close()


def test_a_client_whose_reasons_change_costs_a_write_in_five_seconds_and_the_newest_is_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            await it.devices(1)
            store, client = it.state.services.turned_away, "d0"
            notes = [(0.0, "a"), (1.0, "b"), (4.9, "a"), (5.1, "a"), (5.1, "b"), (11.0, "a"), (70.0, "a"), (71.2, "a")]
            stored = [
                (at, reason) for at, reason in notes if await store.note(RUN, TurnedAway(client, reason, 1000.0 + at))
            ]
            assert stored == [(0.0, "a"), (5.1, "b"), (11.0, "a"), (71.2, "a")]
            assert [(one.reason, one.at) for one in await store.newest(RUN)] == [("a", 1071.2)]

    asyncio.run(scenario())


def test_a_crowd_leaves_a_bounded_number_of_refusals_and_they_go_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            devices = await it.devices(KEPT_MAX + 5)
            store = it.state.services.turned_away
            for second, device in enumerate(devices):
                assert await store.note(RUN, TurnedAway(device.name, "another model", 1000.0 + second))
            newest = [one.client for one in await store.newest(RUN)]
            assert newest == [device.name for device in reversed(devices[-SHOWN_MAX:])]
            assert await kept(it) == KEPT_MAX
            await store.sweep(1000.0 + 7 * 86400.0 + KEPT_MAX)
            assert await kept(it) == 4
            await store.sweep(1000.0 + 8 * 86400.0)
            assert await kept(it) == 0

    asyncio.run(scenario())
