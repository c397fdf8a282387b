"""Refusals that the operator should hear of: the newest of each client, a bounded number of them, for a while."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select

from tests.federations.server_device import House, house, run_file, small_state
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.run.records import AwayKind, TurnedAway
from umbel.aggregation.types import RunId
from umbel.server.devices.turned_away import KEPT_MAX, KEPT_S, SHOWN_MAX
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
            assert [(one.reason, one.at) for one in await store.newest(RUN, 1100.0)] == [("a", 1071.2)]

    asyncio.run(scenario())


def test_a_client_that_has_come_since_is_not_away_and_its_next_word_counts_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            [device] = await it.devices(1)
            store, now = it.state.services.turned_away, it.state.services.clock.now()
            away = TurnedAway("d0", "not yet", now, AwayKind.NOT_READY)
            assert await store.note(RUN, away)
            assert (await device.check_in(Layout.of_state(small_state()), 0.0)).status_code == 200
            assert await store.newest(RUN, now + 1.0) == ()
            later = replace(away, at=now + 5.0)
            assert await store.note(RUN, later), "although the reason is the same"
            assert await store.newest(RUN, now + 6.0) == (later,)

    asyncio.run(scenario())


def test_a_refusal_says_more_than_that_the_process_has_ended_because_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            await it.devices(1)
            store, refusal = it.state.services.turned_away, TurnedAway("d0", "its name is not bound", 1000.0)
            assert await store.note(RUN, refusal)
            ended = TurnedAway("d0", "its process is not running", 1008.0, AwayKind.NOT_READY)
            assert not await store.note(RUN, ended)
            assert await store.newest(RUN, 1009.0) == (refusal,)
            assert await store.note(RUN, replace(ended, at=2000.0)), "once it is not refused again"
            assert await store.note(RUN, TurnedAway("d0", "denied", 2010.0, AwayKind.STAYS_AWAY))

    asyncio.run(scenario())


def test_no_round_waits_for_those_that_stay_away_however_many_others_are_not_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            names = [device.name for device in await it.devices(SHOWN_MAX + 3)]
            store = it.state.services.turned_away
            kinds = [AwayKind.TURNED_AWAY, AwayKind.STAYS_AWAY, *[AwayKind.NOT_READY] * (len(names) - 2)]
            for second, (name, kind) in enumerate(zip(names, kinds, strict=True)):
                assert await store.note(RUN, TurnedAway(name, "why", 1000.0 + second, kind))
            assert await store.staying_away(RUN, 1100.0) == {"d0", "d1"}
            await it.http.delete("/v1/admin/clients/d1", headers=it.admin)
            assert await store.staying_away(RUN, 1100.0) == {"d0"}, "a removed client is not shown either"
            assert await store.staying_away(RUN, 1000.0 + KEPT_S) == set()

    asyncio.run(scenario())


def test_a_crowd_leaves_a_bounded_number_of_refusals_and_they_go_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            devices = await it.devices(KEPT_MAX + 5)
            store = it.state.services.turned_away
            for second, device in enumerate(devices):
                assert await store.note(RUN, TurnedAway(device.name, "another model", 1000.0 + second))
            newest = [one.client for one in await store.newest(RUN, 1100.0)]
            assert newest == [device.name for device in reversed(devices[-SHOWN_MAX:])]
            assert await kept(it) == KEPT_MAX
            await store.sweep(1000.0 + KEPT_S + KEPT_MAX)
            assert await kept(it) == 4
            await store.sweep(1000.0 + 2 * KEPT_S)
            assert await kept(it) == 0

    asyncio.run(scenario())
