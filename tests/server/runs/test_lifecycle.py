"""Pause, resume, rollback: what an operator orders of a run, over HTTP, with restarts in between."""

import asyncio
import json
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from tests.federations.lifecycle_house import lifecycle_run, obeyed, order, train, vector, versions
from tests.federations.server_device import (
    Device,
    House,
    LateClock,
    house,
    pass_time,
    problem,
    run_file,
    small_state,
    update_of,
)
from tests.servers.waits import until
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.retry import DECLINED_ATTEMPTS_MAX

pytestmark = pytest.mark.usefixtures("any_database")
LAYOUT = Layout.of_state(small_state())


async def status(it: House) -> str:
    return str((await it.progress())["run"]["status"])


def test_a_paused_run_lets_its_round_finish_and_begins_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(LAYOUT)
            view = await obeyed(it, "pause", reason="night shift")
            assert (view["status"], view["reason"]) == ("paused", "night shift")
            again = (await device.check_in(LAYOUT)).json()
            assert again["assignment"]["id"] == assignment["id"], "who is at work goes on"
            await train(device, LAYOUT, 0.5)
            [record] = await it.ended(1)
            assert record["committed"]
            told = (await device.check_in(LAYOUT, wait_s=0.3)).json()
            assert (told["run_status"], told["assignment"]) == ("paused", None)
            assert "night shift" in told["reason"]
            assert told["retry_after_s"] > 0
            live = (await it.progress())["live"]
            assert (live["round"], live["phase"], live["why"]) == (2, "recruiting", "the run is paused: night shift")
        async with house(tmp_path) as it:  # a restart leaves it paused
            device.http = it.http
            assert (await device.check_in(LAYOUT, wait_s=0.3)).json()["run_status"] == "paused"
            held = asyncio.create_task(device.check_in(LAYOUT, wait_s=20.0))
            assert (await obeyed(it, "resume"))["status"] == "running"
            assert (await held).json()["assignment"]["id"] == "demo.2.1.d0"

    asyncio.run(scenario())


def test_a_pause_at_once_abandons_the_round_and_blames_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run("", target=2), small_state())
            devices = await it.devices(2)
            first, other = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            url = f"/v1/assignments/{first['id']}?wait_s=20"
            held = asyncio.create_task(devices[0].send("GET", url))
            await train(devices[1], LAYOUT, 0.5)
            await obeyed(it, "pause", reason="maintenance", now=True)
            assert (await held).json()["state"] == "closed"
            [record] = await it.ended(1)
            assert (record["committed"], record["reason"]) == (False, "the run was paused: maintenance")
            assert problem(await devices[0].upload(first["id"], b"late")) == "assignment-closed"
            for _ in range(2):  # pausing again, and resuming again, change nothing
                assert (await obeyed(it, "pause", reason="maintenance", now=True))["status"] == "paused"
            assert len((await it.progress())["ended"]) == 1
            for _ in range(2):
                assert (await obeyed(it, "resume"))["status"] == "running"
            again = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            assert [one["attempt"] for one in again] == [2, 2]
            assert other["seed"] == again[1]["seed"]

    asyncio.run(scenario())


def test_a_decline_that_comes_while_its_round_is_abandoned_is_taken_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(), small_state())
            [device] = await it.devices(1)
            url = f"/v1/assignments/{(await device.work(LAYOUT))['id']}/decline"
            driver = it.state.coordinator.drivers["demo"]
            async with driver._mailbox.moving:  # both are under way before either is decided
                paused = asyncio.create_task(obeyed(it, "pause", reason="maintenance", now=True))
                await until("the order", lambda: len(driver._mailbox._pending) == 1 or None)
                declined = asyncio.create_task(device.send("PUT", url, b'{"reason": "on battery"}'))
                await until("the decline", lambda: len(driver._mailbox._pending) == 2 or None)
            assert (await paused)["status"] == "paused"
            assert (await declined).status_code == 204
            [record] = await it.ended(1)
            assert [client["fate"] for client in record["clients"]] == ["released"]

    asyncio.run(scenario())


@pytest.mark.parametrize("declines_first", [False, True])
def test_only_a_decline_before_the_round_closed_is_a_clients_fate(tmp_path: Path, declines_first: bool) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(target=1, over_selection=2.0), small_state())
            devices = await it.devices(2)
            works = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            update, url = update_of(LAYOUT, torch.zeros(LAYOUT.n_values)), f"/v1/assignments/{works[1]['id']}/decline"
            await devices[0].upload(works[0]["id"], update)
            driver = it.state.coordinator.drivers["demo"]
            report = partial(devices[0].report, works[0]["id"], update)
            decline = partial(devices[1].send, "PUT", url, b'{"reason": "on battery"}')
            async with driver._mailbox.moving:  # one transaction decides on both
                sent = list[asyncio.Task[httpx.Response]]()
                for send in (decline, report) if declines_first else (report, decline):
                    sent.append(asyncio.create_task(send()))
                    await until("the input", lambda: len(driver._mailbox._pending) == len(sent) or None)
            assert {(await one).status_code for one in sent} == {200, 204}
            [record] = await it.ended(1)
            [other] = [client for client in record["clients"] if client["client"] == devices[1].name]
            if declines_first:
                assert (other["fate"], other["reason"]) == ("declined", "on battery")
            else:
                assert other["fate"] == "released"
                assert other["reason"].startswith("had not reported: the target of 1 report is in")

    asyncio.run(scenario())


def test_a_run_that_is_over_is_neither_paused_nor_resumed_nor_rolled_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(), small_state())
            await obeyed(it, "pause", reason="first")
            assert (await obeyed(it, "stop", reason="enough"))["status"] == "stopped"
            for verb, body in (("pause", {}), ("resume", {}), ("rollback", {"to": 0})):
                answer = await order(it, verb, **body)
                assert problem(answer) == "run-over"
                assert "the run is over (status: stopped)" in answer.json()["detail"]
            assert (await obeyed(it, "stop", reason="again"))["reason"] == "enough"
            assert problem(await order(it, "rollback", to="newest")) == "malformed-request"
            assert problem(await order(it, "pause", reason="")) == "malformed-request"

    asyncio.run(scenario())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rollback_goes_on_from_an_older_version_under_a_new_number(tmp_path: Path, optimizer: str) -> None:
    """What the server's optimizer remembered with that version comes back, too."""
    run = lifecycle_run().replace("[aggregation]", f'[aggregation]\noptimizer = "{optimizer}"')

    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run, small_state())
            [device] = await it.devices(1)
            for value in (0.5, 1.0, 2.0):
                await train(device, LAYOUT, value)
            await it.ended(3)
            open_round = await device.work(LAYOUT)
            view = await obeyed(it, "rollback", to=1, reason="round 2 diverged")
            assert (view["model"]["version"], view["rounds_done"], view["status"]) == (4, 3, "running")
            record = (await it.ended(4))[3]
            assert record["reason"] == "rolled back to version 1: round 2 diverged"
            assert (record["committed"], record["rolled_back_to"], record["model_version"]) == (False, 1, 4)
            assert problem(await device.upload(open_round["id"], b"late")) == "assignment-closed"
        async with house(tmp_path) as it:
            device.http = it.http
            found = await versions(it)
            assert [one["version"] for one in found] == [0, 1, 2, 3, 4]
            assert [one["round"] for one in found] == [None, 1, 2, 3, None]
            assert (found[4]["sha256"], found[4]["rolled_back_to"]) == (found[1]["sha256"], 1)
            assert found[4]["parent_sha256"] == found[3]["sha256"], "the history is one line"
            assignment = await train(device, LAYOUT, 1.0)
            assert (assignment["round"], assignment["attempt"]) == (4, 2)
            assert (assignment["model"]["version"], assignment["model"]["sha256"]) == (4, found[1]["sha256"])
            record = (await it.ended(5))[4]
            assert (record["round"], record["model_version"]) == (4, 5)
            after = await versions(it)
            assert after[5]["sha256"] == after[2]["sha256"], "the same update on the same model"

    asyncio.run(scenario())


def test_a_rollback_to_where_the_run_stands_or_to_nowhere_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(), small_state())
            [device] = await it.devices(1)
            await train(device, LAYOUT, 0.5)
            await it.ended(1)
            await obeyed(it, "rollback", to=0)
            assert (await obeyed(it, "rollback", to=0))["model"]["version"] == 2, "a lost answer's repeat does no harm"
            answer = await order(it, "rollback", to=7)
            assert problem(answer) == "unknown-version"
            assert answer.json()["detail"] == "there is no version 7; the run has versions 0 to 2"
            assert "no [stop]" in (await order(it, "rollback", to="best")).json()["detail"]
            assert len(await versions(it)) == 3
            assert [one["version"] for one in await versions(it, "?after=0&limit=1")] == [1]

    asyncio.run(scenario())


def test_a_rollback_while_paused_leaves_the_run_paused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(), small_state())
            [device] = await it.devices(1)
            await train(device, LAYOUT, 0.5)
            await it.ended(1)
            await obeyed(it, "pause", reason="looking")
            assert (await obeyed(it, "rollback", to=0))["status"] == "paused"
            assert (await device.check_in(LAYOUT, wait_s=0.2)).json()["run_status"] == "paused"
            await obeyed(it, "resume")
            assert (await train(device, LAYOUT, 0.5))["model"]["version"] == 2

    asyncio.run(scenario())


def test_a_rollback_beats_a_round_that_is_being_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(), small_state())
            [device] = await it.devices(1)
            await train(device, LAYOUT, 0.5)
            await it.ended(1)
            assignment = await device.work(LAYOUT)
            update = update_of(LAYOUT, vector(LAYOUT, 1.0))
            await device.upload(assignment["id"], update)
            reported, view = await asyncio.gather(
                device.report(assignment["id"], update), obeyed(it, "rollback", to=0, reason="no")
            )
            assert reported.status_code == 200
            found = await versions(it)
            assert found[-1]["version"] == view["model"]["version"]
            assert (found[-1]["rolled_back_to"], found[-1]["sha256"]) == (0, found[0]["sha256"])

    asyncio.run(scenario())


async def decline(device: Device, reason: str) -> None:
    assignment = await device.work(LAYOUT)
    await device.send("PUT", f"/v1/assignments/{assignment['id']}/decline", json.dumps({"reason": reason}).encode())


def test_a_run_that_clients_decline_again_and_again_pauses_with_their_reason_until_an_operator_resumes_it(
    tmp_path: Path,
) -> None:
    clock, policy = LateClock(), "this site takes part in rounds of five sites or more"

    async def scenario() -> None:
        async with house(tmp_path, clock) as it:
            await it.begin(run_file(target=2, minimum=2, window_s=5.0), small_state())
            devices = await it.devices(2)
            for attempt in range(1, DECLINED_ATTEMPTS_MAX + 1):
                assert await status(it) == "running"
                await asyncio.gather(*(decline(device, policy) for device in devices))
                await it.ended(attempt)
                await pass_time(it, clock, 5.0)
            told = await it.progress()
            assert told["run"]["status"] == "paused"
            assert f"2 clients declined: {policy}. Remove the cause, then resume the run" in told["run"]["reason"]
            assert told["live"]["why"] == f"the run is paused: {told['run']['reason']}"
        async with house(tmp_path, clock) as it:
            for device in devices:
                device.http = it.http
            assert (await devices[0].check_in(LAYOUT, wait_s=0.0)).json()["run_status"] == "paused"
            assert (await obeyed(it, "resume"))["status"] == "running"
            await asyncio.gather(*(train(device, LAYOUT, 0.5) for device in devices))
            assert (await it.ended(DECLINED_ATTEMPTS_MAX + 1))[-1]["committed"]

    asyncio.run(scenario())
