"""A client that the operator has removed: nothing of it that was under way goes on."""

import asyncio
from pathlib import Path

import pytest

from tests.federations.server_device import House, house, problem, run_file, small_state
from tests.servers.waits import until, until_told

pytestmark = pytest.mark.usefixtures("any_database")


async def revoke(it: House, client: str) -> None:
    assert (await it.http.delete(f"/v1/admin/clients/{client}", headers=it.admin)).status_code == 204


def test_a_client_that_is_removed_while_its_key_is_read_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            devices = await it.devices(20)
            for device in devices:  # none is cached yet: reading a key and removing it run side by side
                asked = (device.send("GET", "/v1/models/" + "0" * 64) for _ in range(4))
                await asyncio.gather(revoke(it, device.name), *asked)
                again = await device.send("GET", "/v1/models/" + "0" * 64)
                assert problem(again) == "client-removed"

    asyncio.run(scenario())


def test_a_removed_client_that_waits_for_work_is_told_so_and_not_drawn(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            removed, first, second = await it.devices(3)
            held = asyncio.create_task(removed.check_in(layout))
            await until_told("a client that waits", (await it.driver()).waiting.candidates)
            await revoke(it, removed.name)
            assert problem(await held) == "client-removed"
            await asyncio.gather(first.work(layout), second.work(layout))
            live = (await it.progress())["live"]
            assert {client["client"] for client in live["clients"]} == {first.name, second.name}

    asyncio.run(scenario())


def test_check_ins_that_are_under_way_while_a_client_is_removed_do_not_keep_it_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            for device in await it.devices(4):
                asked = [asyncio.create_task(device.check_in(layout)) for _ in range(8)]
                await asyncio.sleep(0.002)
                asked += [asyncio.create_task(device.check_in(layout)) for _ in range(8)]
                await revoke(it, device.name)
                await asyncio.gather(*asked)
            assert not await (await it.driver()).waiting.candidates()
            assert not await (await it.driver()).waiting.count()

    asyncio.run(scenario())


def test_a_round_waits_no_more_for_a_removed_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            held = asyncio.create_task(device.send("GET", f"/v1/assignments/{assignment['id']}?wait_s=20"))
            bells = (await it.driver()).bells
            await until("a request that is held open", lambda: bells.is_heard(device.name))
            await revoke(it, device.name)
            assert problem(await held) == "client-removed"
            [record] = await it.ended(1)
            assert not record["committed"]
            assert record["clients"][0]["reason"] == "the operator removed this client"

    asyncio.run(scenario())
