"""A client says why it does not come to a run that is open to it; its operator sees it until the client comes."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.federations.secure_cohort import STATE, all_waiting, secure_run
from tests.federations.server_device import Device, House, LateClock, house, problem, run_file, small_state
from tests.server.devices.test_member_lists import bound_run, list_of, put_run, text_of
from tests.servers.waits import until
from umbel.aggregation.messages import REASON_CHARS_MAX
from umbel.aggregation.model.layout import Layout

pytestmark = pytest.mark.usefixtures("any_database")


async def say(device: Device, reason: str, run: str = "demo", *, may_come: bool = False) -> httpx.Response:
    body = json.dumps({"reason": reason, "may_come": may_come}).encode()
    return await device.send("PUT", f"/v1/runs/{run}/not-coming", body)


async def away(it: House) -> list[tuple[str, str, str]]:
    found = (await it.progress())["turned_away"]
    return [(one["client"], one["kind"], one["reason"]) for one in found]


def test_its_word_is_shown_until_it_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            [one, other] = await it.devices(2)
            assert (await say(one, "a person must decide", may_come=True)).status_code == 204
            assert (await say(other, "the policy refuses it")).status_code == 204
        async with house(tmp_path) as it:
            one.http = it.http
            assert sorted(await away(it)) == [
                ("d0", "not ready", "a person must decide"),
                ("d1", "stays away", "the policy refuses it"),
            ]
            assert (await one.check_in(Layout.of_state(small_state()), 0.0)).status_code == 200
            assert [client for client, _, _ in await away(it)] == ["d1"]

    asyncio.run(scenario())


def test_whoever_watches_the_run_hears_of_it_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            [device] = await it.devices(1)
            driver, mark = await it.driver(), (await it.progress())["mark"]
            await say(device, "the policy refuses it")
            assert driver.now.has_changed_since(mark), "a held request for the run's progress is answered"

    asyncio.run(scenario())


def test_only_a_run_that_is_open_to_the_client_can_be_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            *members, stranger = await it.devices(4, sample_count=0)
            listed = list_of(*members)
            assert (await put_run(it, bound_run(listed, target=3, minimum=3), text_of(listed))).status_code == 201
            assert problem(await say(stranger, "no")) == "not-a-member"
            assert problem(await say(stranger, "no", run="other")) == "unknown-run"
            assert await away(it) == []
            await it.http.post("/v1/admin/runs/demo/stop", json={}, headers=it.admin)
            assert (await say(members[0], "no")).status_code == 204, "the run may have ended just now"
            assert await away(it) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["", "x" * (REASON_CHARS_MAX + 1), "a\0b"])
def test_a_reason_that_cannot_be_kept_is_refused(tmp_path: Path, reason: str) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(), small_state())
            [device] = await it.devices(1)
            assert problem(await say(device, reason)) == "malformed-request"
            assert await away(it) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("may_come", [True, False])
def test_the_first_round_waits_for_a_client_that_may_come_and_not_for_one_that_stays_away(
    tmp_path: Path, *, may_come: bool
) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(window_s=100.0), STATE)
            sites, driver = await it.devices(4, sample_count=0), await it.driver()
            async with all_waiting(it, sites[:3]):
                await until("a run that waits for the last site", lambda: driver.state.missing == ("d3",))
                await say(sites[3], "no", may_come=may_come)
                clock.late_s += driver.plan.patience_s + 1.0
                driver.wake()
                if may_come:
                    waits = "3 of 4 here; starting with these in at most 4 min"
                    await until("the next look, which waits on", lambda: waits in driver.state.why)
                else:
                    await until("a round that is open", lambda: driver.state.phase == "training")
                    assert sorted(driver.state.cohort) == ["d0", "d1", "d2"]

    asyncio.run(scenario())


def test_a_word_that_comes_late_does_not_hide_that_the_client_has_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(window_s=100.0), STATE)
            [site, *_] = await it.devices(4, sample_count=0)
            async with all_waiting(it, [site]):
                clock.late_s += 1.0
                assert (await say(site, "its process is starting", may_come=True)).status_code == 204
                assert await away(it) == []
                await say(site, "a person at the site denied it")
                assert [kind for _, kind, _ in await away(it)] == ["stays away"]

    asyncio.run(scenario())
