"""A canary before the first round, over HTTP: who is tried, what counts as a report, and what follows."""

import asyncio
from pathlib import Path

import pytest

from tests.federations.lifecycle_house import lifecycle_run, obeyed, train, vector
from tests.federations.server_device import (
    Device,
    House,
    Json,
    house,
    houses_over,
    problem,
    rows,
    small_state,
    stored_updates,
    update_of,
)
from tests.servers.postgres import Cluster
from tests.servers.waits import until
from umbel.aggregation.model.layout import Layout

LAYOUT = Layout.of_state(small_state())
CANARY = "[canary]\nclients = 2\nshare = 0.25\n"
RUN = lifecycle_run(CANARY, count=1, target=2, window_s=60.0)
PROBE: Json = {"steps_full": 16, "step_s": 0.5, "download_bytes_per_s": 1e6}
SLOW: Json = {**PROBE, "step_s": 5.0}


async def tried(device: Device, probe: Json, value: float = 0.5) -> Json:
    """Take part in a canary; the assignment."""
    assignment = await device.work(LAYOUT)
    assert assignment["task"] == "canary", assignment
    await delivered(device, assignment, probe, value)
    return assignment


async def delivered(device: Device, assignment: Json, probe: Json, value: float = 0.5) -> None:
    update = update_of(LAYOUT, vector(LAYOUT, value))
    assert (await device.upload(assignment["id"], update)).status_code == 201
    answer = await device.report(assignment["id"], update, probe=probe)
    assert answer.json() == {"outcome": "accepted", "reason": "the report counts"}, answer.text


def reasons(record: Json) -> dict[str, tuple[str, str]]:
    return {one["client"]: (one["fate"], one["reason"]) for one in record["clients"]}


async def status(it: House) -> tuple[str, str]:
    run = (await it.progress())["run"]
    return run["status"], run["reason"]


@pytest.mark.usefixtures("any_database_in_time")
def test_a_canary_that_passes_makes_no_model_and_the_first_round_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            devices = await it.devices(2)
            live = (await it.progress())["live"]
            assert (live["task"], live["round"], live["target"]) == ("canary", 1, 2)
            first, second = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            assert (first["id"], first["task"], first["share"]) == ("demo.1.c1.d0", "canary", 0.25)
            await delivered(devices[0], first, PROBE)
        async with house(tmp_path) as it:  # what was tried outlives a restart
            for device in devices:
                device.http = it.http
            assert await tried(devices[1], PROBE) == {**second, "window_s": pytest.approx(second["window_s"], abs=30)}
            [record] = await it.ended(1)
            assert (record["task"], record["round"], record["committed"]) == ("canary", 1, True)
            assert (record["model_version"], record["reported"]) == (0, 2)
            assert record["reason"] == "2 of 2 clients pass the canary"
            fate, reason = reasons(record)["d0"]
            assert fate == "accepted"
            assert reason.startswith("a whole round takes 8 s: 0.5 s a step x 16 steps + ")
            assert reason.endswith("; largest change 0.5 of max_abs 8")
            assert (await it.progress())["run"]["rounds_done"] == 0
            tasks = await asyncio.gather(*(train(device, LAYOUT, 0.5) for device in devices))
            assert [(task["id"], task["share"]) for task in tasks] == [("demo.1.1.d0", 1.0), ("demo.1.1.d1", 1.0)]
            assert (await it.ended(2))[1]["model_version"] == 1
            assert await status(it) == ("finished", "the one round is committed")
            assert (await it.progress())["run"]["rounds_done"] == 1
            await until("a store without updates", lambda: not stored_updates(it.settings))

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database_in_time")
def test_a_canary_that_fails_ends_the_run_with_a_cause_for_each_site(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run('[canary]\non_failure = "stop"\n', target=3, window_s=60.0), small_state())
            devices = await it.devices(3)
            tasks = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            await delivered(devices[0], tasks[0], {**SLOW, "is_loss_finite": False}, value=5.0)
            await delivered(devices[1], tasks[1], PROBE)
            waiting = asyncio.create_task(devices[1].check_in(LAYOUT, wait_s=20.0))
            url = f"/v1/assignments/{tasks[2]['id']}/decline"
            await devices[2].send("PUT", url, b'{"reason": "not on weekdays"}')
            [record] = await it.ended(1)
            assert (record["committed"], record["model_sha256"]) == (False, None)
            told = reasons(record)
            assert told["d0"][0] == "unfit"
            for cause in ("window_s of at least ", "loss is not finite", "raise max_abs to at least 10"):
                assert cause in told["d0"][1]
            assert told["d1"][0] == "accepted"
            assert told["d2"] == ("declined", "not on weekdays")
            state, reason = await status(it)
            assert state == "failed"
            assert reason.startswith(
                "the canary has failed: 1 of 3 clients passes the canary, at least 2 must. "
                "d0: window_s of at least 97 needed, not 60: 5 s a step x 16 steps + "
            )
            assert reason.endswith("; d2: not on weekdays")
            told_client = (await waiting).json()
            assert (told_client["run_status"], told_client["reason"]) == ("failed", reason)
            assert (await it.progress())["live"] is None

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database_in_time")
def test_one_broken_site_of_three_holds_up_nobody_and_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run("[canary]\n", count=1, target=3, window_s=60.0), small_state())
            devices = await it.devices(3)
            probes = ({**SLOW, "is_loss_finite": False}, PROBE, PROBE)
            await asyncio.gather(*(tried(device, probe) for device, probe in zip(devices, probes, strict=True)))
            [record] = await it.ended(1)
            assert record["committed"]
            assert record["reason"].startswith("2 of 3 clients pass the canary. d0: window_s of at least ")
            assert [one["fate"] for one in record["clients"]] == ["unfit", "accepted", "accepted"]
            await asyncio.gather(*(train(device, LAYOUT, 0.5) for device in devices))
            assert (await it.ended(2))[1]["task"] == "training"

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database_in_time")
def test_a_canary_that_fails_pauses_the_run_and_when_it_is_resumed_others_try(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run("[canary]\nclients = 2\n", count=1, target=2, window_s=60.0), small_state())
            devices = await it.devices(4)
            first, _ = await asyncio.gather(*(tried(device, SLOW) for device in devices[:2]))
            assert first["id"] == "demo.1.c1.d0"
            [record] = await it.ended(1)
            assert (record["committed"], record["model_sha256"]) == (False, None)
            state, reason = await status(it)
            assert state == "paused"
            assert reason.startswith(
                "the canary has failed: 0 of 2 clients pass the canary, at least 2 must. d0: window_s"
            )
            assert reason.endswith("Resume the run to try other clients, if there are any")
            answers = await asyncio.gather(*(device.check_in(LAYOUT, wait_s=0.05) for device in devices))
            assert {one.json()["run_status"] for one in answers} == {"paused"}
        async with house(tmp_path) as it:  # the pause, and who has failed, outlive a restart
            for device in devices:
                device.http = it.http
            assert await status(it) == (state, reason)
            waiting = [asyncio.create_task(device.check_in(LAYOUT, wait_s=20.0)) for device in devices[:2]]
            for device in devices:
                await device.check_in(LAYOUT, wait_s=0.05)
            await obeyed(it, "resume")
            again = await asyncio.gather(*(tried(device, PROBE) for device in devices[2:]))
            assert [one["id"] for one in again] == ["demo.1.c2.d2", "demo.1.c2.d3"]
            assert (await it.ended(2))[1]["committed"]
            tasks = [(await answer).json()["assignment"] for answer in waiting]
            assert any(task is None or task["task"] == "training" for task in tasks)
            assert (await status(it))[0] == "running"

    asyncio.run(scenario())


def test_a_canary_that_may_fail_says_so_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(
                lifecycle_run(CANARY + 'on_failure = "widen"\n', count=1, target=2, window_s=60.0), small_state()
            )
            devices = await it.devices(2)
            await asyncio.gather(*(tried(device, SLOW) for device in devices))
            await asyncio.gather(*(train(device, LAYOUT, 0.5) for device in devices))
            ended = await it.ended(2)
            assert [(one["task"], one["committed"]) for one in ended] == [("canary", False), ("training", True)]
            assert "0 of 2 clients pass the canary, at least 2 must" in ended[0]["reason"]

    asyncio.run(scenario())


def test_a_canary_is_cut_short_by_a_pause_and_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            devices = await it.devices(2)
            first, _ = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            await obeyed(it, "pause", now=True)
            await obeyed(it, "resume")
            again = await asyncio.gather(*(tried(device, PROBE) for device in devices))
            assert [one["id"] for one in again] == ["demo.1.c2.d0", "demo.1.c2.d1"]
            update = update_of(LAYOUT, vector(LAYOUT, 0.5))
            assert problem(await devices[0].upload(first["id"], update)) == "assignment-closed"
            assert [one["committed"] for one in await it.ended(2)] == [False, True]
            await asyncio.gather(*(train(device, LAYOUT, 0.5) for device in devices))
            assert (await it.ended(3))[2]["task"] == "training"

    asyncio.run(scenario())


def test_a_stop_ends_a_canary_and_its_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            devices = await it.devices(2)
            await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            await obeyed(it, "stop", reason="enough")
            [record] = await it.ended(1)
            assert (record["task"], record["committed"]) == ("canary", False)
            assert await status(it) == ("stopped", "enough")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("probe", "kind"),
    [
        (None, "report-refused"),
        ({**PROBE, "steps_full": 0}, "malformed-request"),
        ({**PROBE, "step_s": -1.0}, "malformed-request"),
        ({**PROBE, "download_bytes_per_s": 0.0}, "malformed-request"),
        ({**PROBE, "memory_bytes": 1 << 61}, "malformed-request"),
        ({**PROBE, "memory_bytes": True}, "malformed-request"),
        ({**PROBE, "last_loss": 1e31}, "malformed-request"),
        ("fine", "malformed-request"),
    ],
)
def test_a_report_without_a_probe_that_makes_sense_is_refused(
    tmp_path: Path, probe: Json | str | None, kind: str
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run("[canary]\nclients = 1\n", window_s=60.0), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(LAYOUT)
            update = update_of(LAYOUT, vector(LAYOUT, 0.5))
            await device.upload(assignment["id"], update)
            before = rows(it.settings)
            assert problem(await device.report(assignment["id"], update, probe=probe)) == kind
            assert rows(it.settings) == before
            await device.report(assignment["id"], update, probe=PROBE)
            assignment = await device.work(LAYOUT)
            assert assignment["task"] == "training"
            await device.upload(assignment["id"], update)
            assert problem(await device.report(assignment["id"], update, probe=PROBE)) == "report-refused"

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database_in_time")
def test_whoever_is_turned_away_is_shown_until_it_is_let_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            [device, other] = await it.devices(2)
            assert (await it.progress())["turned_away"] == []
            for one, digest in ((device, "0" * 64), (other, "1" * 64), (other, "1" * 64)):
                assert problem(await one.check_in(LAYOUT, layout_digest=digest)) == "wrong-layout"
        async with house(tmp_path) as it:
            device.http = it.http
            away = (await it.progress())["turned_away"]
            assert {one["client"] for one in away} == {"d0", "d1"}
            assert all("this client's model does not fit the run's" in one["reason"] for one in away)
            await device.check_in(LAYOUT, wait_s=0.05)
            assert [one["client"] for one in (await it.progress())["turned_away"]] == ["d1"]

    asyncio.run(scenario())


def test_replicas_try_out_a_round_together(tmp_path: Path, postgresql: Cluster) -> None:
    url = postgresql.new_database()

    async def scenario() -> None:
        async with house(tmp_path) as one, house(tmp_path) as other:
            await one.begin(RUN, small_state())
            devices = await one.devices(2)
            devices[1].http = other.http
            await asyncio.gather(*(tried(device, PROBE) for device in devices))
            for it in (one, other):
                assert [record["reason"] for record in await it.ended(1)] == ["2 of 2 clients pass the canary"]
            await asyncio.gather(*(train(device, LAYOUT, 0.5) for device in devices))
            assert (await other.ended(2))[1]["model_version"] == 1

    with houses_over(lambda _: url):
        asyncio.run(scenario())
