"""What grows with the cohort is worked out before a round's end is decided, and read in parts."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import House, Json, house, run_file, small_state, update_of
from tests.servers.waits import LIMIT_S, until
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.states import Closing, Committed
from umbel.aggregation.types import RunId
from umbel.server.runs import step
from umbel.server.runs.driver import RunDriver
from umbel.server.store import run_rows
from umbel.server.store.stored import Traffic

LAYOUT = Layout.of_state(small_state())


async def last_bundle(it: House) -> Json:
    answer = await it.http.get("/v1/admin/runs/demo/audit", headers=it.admin)
    assert answer.status_code == 200, answer.text
    bundle = answer.json()["bundles"][-1]["bundle"]
    return dict(json.loads(bundle) if isinstance(bundle, str) else bundle)


async def committed(it: House, n_clients: int) -> Json:
    await it.begin(run_file(target=n_clients), small_state())
    devices = await it.devices(n_clients)
    await asyncio.gather(*(device.take_part(LAYOUT, torch.ones(LAYOUT.n_values)) for device in devices))
    [record] = await it.ended(1)
    return record


def test_a_round_that_commits_works_out_nothing_of_its_clients_under_the_runs_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            assert (await committed(it, n_clients=2))["committed"]

    monkeypatch.delattr(step, "attempt_clients")  # what works it out there, for rounds that are abandoned
    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database")
def test_a_cohort_that_is_read_in_parts_is_told_and_signed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            record = await committed(it, n_clients=4)
            signed = (await last_bundle(it))["facts"]["clients"]
            for clients in (record["clients"], signed):
                assert [one["client"] for one in clients] == ["d0", "d1", "d2", "d3"]
            assert all(one["report"]["signature"] for one in signed)

    monkeypatch.setattr(run_rows, "_ROWS_AT_ONCE", 2)
    asyncio.run(scenario())


class SlowTraffic:
    """A coordinator's counted bytes, which it begins to store, and goes on with when `goes_on` is set."""

    def __init__(self, it: House, driver: RunDriver) -> None:
        self.driver = driver
        self.goes_on = asyncio.Event()
        self._has_begun = asyncio.Event()
        rounds = it.state.services.rounds
        self._store, rounds.add_traffic = rounds.add_traffic, self._add

    async def begun(self) -> "asyncio.Task[None]":
        """Have it store what it has counted; the task, once it is at it."""
        storing = asyncio.create_task(self.driver.flush_traffic())
        await asyncio.wait_for(self._has_begun.wait(), LIMIT_S)
        return storing

    def go_on_when_it_closes(self) -> None:
        close = self.driver.close

        async def closing() -> None:
            self.goes_on.set()
            await close()

        self.driver.close = closing  # type: ignore[method-assign]

    async def _add(self, run: RunId, counted: Traffic) -> None:
        if counted.assignments:
            self._has_begun.set()
            await self.goes_on.wait()
        await self._store(run, counted)


def test_bytes_that_are_being_stored_while_a_round_closes_are_told_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(LAYOUT)
            slow = SlowTraffic(it, await it.driver())
            model = await device.send("GET", f"/v1/models/{assignment['model']['sha256']}")
            storing = await slow.begun()
            update = update_of(LAYOUT, torch.ones(LAYOUT.n_values))
            await device.upload(assignment["id"], update)
            await device.report(assignment["id"], update)
            await until("a round that has closed", lambda: isinstance(slow.driver.state, Closing | Committed))
            slow.goes_on.set()
            [record] = await it.ended(1)
            await storing
            assert record["bytes_down"] == len(model.content)

    asyncio.run(scenario())


def test_bytes_that_are_being_stored_while_a_coordinator_goes_away_are_told_by_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(LAYOUT)
            slow = SlowTraffic(it, await it.driver())
            model = await device.send("GET", f"/v1/models/{assignment['model']['sha256']}")
            storing = await slow.begun()
            storing.cancel()
            await asyncio.wait([storing])
            slow.go_on_when_it_closes()
        async with house(tmp_path) as it:
            device.http = it.http
            update = update_of(LAYOUT, torch.ones(LAYOUT.n_values))
            await device.upload(assignment["id"], update)
            await device.report(assignment["id"], update)
            [record] = await it.ended(1)
            assert record["bytes_down"] == len(model.content)

    asyncio.run(scenario())
