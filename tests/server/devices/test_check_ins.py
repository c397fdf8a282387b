"""A check-in changes nothing unless it is admitted, and what it changes is stored with its nonce."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from tests.federations.server_device import Device, Json, house, problem, run_file, small_state
from tests.servers.waits import until
from umbel.aggregation.errors import ReplayedNonce
from umbel.aggregation.messages import CheckIn
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId
from umbel.server.devices.waiting import HELD_PER_CLIENT_MAX, HeldRequest, Waiter, WaitingRoom
from umbel.server.runs.reception import Visit
from umbel.server.store.database import Database, Write
from umbel.server.store.waiters import WaiterStore, Waiting

pytestmark = pytest.mark.usefixtures("any_database")
_URL = "/v1/check-ins"


def body_of(device: Device, layout: Layout, wait_s: float) -> bytes:
    message = {"run": device.run, "sample_count": 10, "layout_digest": layout.digest, "wait_s": wait_s}
    return json.dumps(message).encode()


async def entered(room: WaitingRoom, waiters: WaiterStore, candidate: Candidate) -> Waiter:
    """This candidate waits from now on."""
    entry = room.entry(candidate, 30.0)
    await waiters.put(entry)
    return room.enter(entry)


def test_a_stranger_who_repeats_a_clients_check_in_does_not_end_those_it_holds_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            [device] = await it.devices(1)
            body = body_of(device, layout, 20.0)
            signed: list[Json] = [device.headers("POST", _URL, body) for _ in range(HELD_PER_CLIENT_MAX)]
            held = [asyncio.create_task(it.http.post(_URL, content=body, headers=one)) for one in signed]
            lines = it.state.lines._held
            await until(
                "as many held requests", lambda: len(lines.get((device.name, device.run), ())) == HELD_PER_CLIENT_MAX
            )
            bells = (await it.driver()).bells
            await until(
                "a request that waits", lambda: len(bells._listening.get(device.name, ())) == HELD_PER_CLIENT_MAX
            )
            for one in signed:
                assert problem(await it.http.post(_URL, content=body, headers=one)) == "replayed-nonce"
            assert not any(request.done() for request in held)
            assert (await it.progress())["live"]["waiting"] == 1
            for request in held:
                request.cancel()

    asyncio.run(scenario())


def test_a_check_in_with_a_body_other_than_the_signed_one_may_be_sent_again(tmp_path: Path) -> None:
    """Nothing was remembered of it, so that a body that was damaged on its way costs no new signature."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            [device] = await it.devices(1)
            body = body_of(device, layout, 0.0)
            signed = device.headers("POST", _URL, body)
            damaged = await it.http.post(_URL, content=body.replace(b"demo", b"dem0"), headers=signed)
            assert problem(damaged) == "wrong-digest"
            assert (await it.http.post(_URL, content=body, headers=signed)).status_code == 200
            assert problem(await it.http.post(_URL, content=body, headers=signed)) == "replayed-nonce"

    asyncio.run(scenario())


def test_a_check_in_that_is_not_admitted_leaves_the_waiting_room_as_it_was(tmp_path: Path) -> None:
    async def replay(_: Waiting | None) -> None:
        raise ReplayedNonce("already received")

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            [device] = await it.devices(1)
            waiters, room = it.state.services.waiters, (await it.driver()).waiting
            candidate = Candidate(ClientId(device.name), 10)
            waiter = await entered(room, waiters, candidate)
            message = TypeAdapter(CheckIn).validate_json(body_of(device, layout, 0.0))
            for again in (message, replace(message, layout_digest="0" * 64), replace(message, sample_count=0)):
                with pytest.raises(ReplayedNonce):
                    await it.state.reception.check_in(Visit(candidate.client, again, replay, unheld))
            assert await room.candidates() == (candidate,)
            assert waiter.held == 1
            room.leave(waiter, still_waits=False)
            await waiters.settle()
            assert await room.candidates() == ()

    asyncio.run(scenario())


def unheld() -> AbstractContextManager[HeldRequest]:
    raise AssertionError("a request that is not admitted is not held open")


def test_replays_do_not_take_the_others_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with replays in it is not tried again for each: one client could slow down everyone with one request."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            [device] = await it.devices(1)
            body = body_of(device, layout, 0.0)
            old = device.headers("POST", _URL, body)
            assert (await it.http.post(_URL, content=body, headers=old)).status_code == 200
            new = [device.headers("POST", _URL, body) for _ in range(20)]
            transactions = Counter[str]()
            write = Database.write

            async def counted(database: Database, name: str, writes: Iterable[Write]) -> None:
                transactions[name] += 1
                await write(database, name, writes)

            monkeypatch.setattr(Database, "write", counted)
            asked = [it.http.post(_URL, content=body, headers=one) for fresh in new for one in (old, fresh, fresh)]
            answers = [answer.status_code for answer in await asyncio.gather(*asked)]
            assert answers[::3] == [401] * len(new)
            pairs = zip(answers[1::3], answers[2::3], strict=True)
            assert all(sorted(pair) == [200, 401] for pair in pairs), "either may come first"
            assert 0 < transactions["admit"] < len(new)

    asyncio.run(scenario())


def test_who_has_left_is_stored_with_the_next_check_ins_even_if_one_of_those_is_a_replay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=4), small_state())
            devices, waiters = await it.devices(3), it.state.services.waiters
            room = (await it.driver()).waiting
            body = body_of(devices[0], layout, 0.0)
            old = devices[0].headers("POST", _URL, body)
            assert (await it.http.post(_URL, content=body, headers=old)).status_code == 200
            await waiters.settle()
            for other, status in ((devices[1], 200), (devices[2], 401)):
                waiter = await entered(room, waiters, Candidate(ClientId(other.name), 10))
                assert other.name in {one.client for one in await room.candidates()}
                room.leave(waiter, still_waits=False)
                headers = old if status == 401 else devices[0].headers("POST", _URL, body)
                assert (await it.http.post(_URL, content=body, headers=headers)).status_code == status
                await waiters.settle()
                assert other.name not in {one.client for one in await room.candidates()}

    asyncio.run(scenario())


def test_what_was_taken_for_a_transaction_that_fails_is_stored_by_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(target=4), small_state())
            [device] = await it.devices(1)
            waiters, room = it.state.services.waiters, (await it.driver()).waiting
            waiter = await entered(room, waiters, Candidate(ClientId(device.name), 10))
            room.leave(waiter, still_waits=False)
            taken = waiters.take_noted()
            assert [one.client for one in taken] == [device.name]
            await waiters.settle()
            assert len(await room.candidates()) == 1, "whoever has taken it stores it"
            waiters.note_all(taken)
            await waiters.settle()
            assert await room.candidates() == ()

    asyncio.run(scenario())


def test_the_layout_of_a_replay_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(target=2), small_state())
            [device] = await it.devices(1)
            theirs = Layout.of_state({"other": torch.zeros(1)})
            body = json.dumps({**json.loads(body_of(device, theirs, 0.0)), "layout": theirs.to_json()}).encode()
            signed = device.headers("POST", _URL, body)
            assert problem(await it.http.post(_URL, content=body, headers=signed)) == "wrong-layout"
            monkeypatch.delattr(Layout, "from_json")
            assert problem(await it.http.post(_URL, content=body, headers=signed)) == "replayed-nonce"

    asyncio.run(scenario())
