"""A small secure run waits for the sites that are likely to come, and says for whom and how long."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.federations.secure_cohort import LAYOUT, STATE, Attempt, all_waiting, fates, ordered, secure_run
from tests.federations.server_device import Device, House, LateClock, house, run_file
from tests.servers.waits import until
from umbel.aggregation.round.states import Recruiting
from umbel.server.runs.expected import UP_S

MISSING = ("d3",)
SOON = "waiting for clients: 3 of 4 here; starting with these in at most 10.0 s"
RUN = secure_run(window_s=100.0)  # 10 s of patience: a check-in of these tests waits for 20 s
pytestmark = pytest.mark.usefixtures("any_database")


@asynccontextmanager
async def three_of_four(it: House, clock: LateClock, run: str = RUN) -> AsyncGenerator[Sequence[Device]]:
    """All sites but the last wait, longer than the plan's patience."""
    await it.begin(run, STATE)
    sites, driver = await it.devices(4, sample_count=0), await it.driver()
    async with all_waiting(it, sites[:3]):
        await until("a run that misses the last site", lambda: driver.state.missing == MISSING)
        clock.late_s += driver.plan.patience_s + 1.0
        driver.wake()
        yield sites


def _waits(driver: Any, clock: LateClock, longer_than_s: float = 0.0) -> bool:
    """Whether the run waits for expected sites, and for longer than this."""
    state = driver.state
    return isinstance(state, Recruiting) and (state.waits_until or 0.0) > clock.now() + longer_than_s


def test_the_first_round_begins_with_the_site_that_comes_late(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it, three_of_four(it, clock) as sites:
            driver = await it.driver()
            why = (await it.progress())["live"]["why"]
            assert why.startswith(
                "waiting for clients: 3 of 4 here; missing: d3; starting with these in at most 4 min "
            )
            assert why.endswith("or at once with: umbel run start demo")
            answer = await sites[0].check_in(LAYOUT, 0.0)
            assert "d3" not in answer.text, "a site does not learn the names of others from its check-in"
            async with all_waiting(it, sites[3:]):
                await until("a round that is open", lambda: driver.state.phase == "training")
            assert sorted(driver.state.cohort) == ["d0", "d1", "d2", "d3"]

    asyncio.run(scenario())


def test_when_the_time_is_over_the_round_begins_without_the_site(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        run = RUN.replace("[rounds]", "[rounds]\nwait_for_all_s = 15", 1)
        async with house(tmp_path, clock) as it, three_of_four(it, clock, run):
            driver = await it.driver()
            ends_at = driver.state.waits_until
            assert ends_at is not None, "the round still waits"
            clock.late_s += ends_at - clock.now()
            driver.wake()
            await until("a round that is open", lambda: driver.state.phase == "training")
            assert sorted(driver.state.cohort) == ["d0", "d1", "d2"]

    asyncio.run(scenario())


def test_an_operator_starts_the_round_at_once_and_the_order_outlives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            sites = await it.devices(4, sample_count=0)
            await ordered(it, "start")
            assert isinstance((await it.driver()).state, Recruiting), "too few sites wait"
        async with house(tmp_path, clock) as it:
            driver = await it.driver()
            for site in sites:
                site.http = it.http
            async with all_waiting(it, sites[:3]):
                await until("a round that is open", lambda: driver.state.phase == "training")
            assert sorted(driver.state.cohort) == ["d0", "d1", "d2"]

    asyncio.run(scenario())


def test_a_removed_site_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it, three_of_four(it, clock):
            driver = await it.driver()
            await it.http.delete("/v1/admin/clients/d3", headers=it.admin)
            driver.wake()
            await until("a round that is open", lambda: driver.state.phase == "training")

    asyncio.run(scenario())


def test_an_unused_token_is_waited_for_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            sites, driver = await it.devices(3, sample_count=0), await it.driver()
            await it.tokens(1)
            async with all_waiting(it, sites):
                await until(
                    "a run that waits for more", lambda: (driver.state.waits_until or 0.0) > clock.now() + 200.0
                )
                clock.late_s += driver.plan.patience_s + 1.0
                driver.wake()
                assert (await it.progress())["live"]["phase"] == "recruiting"

    asyncio.run(scenario())


def test_a_site_that_works_in_another_run_is_waited_for_if_it_has_an_agent(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            other = run_file(target=1, minimum=1).replace('"demo"', '"other"')
            assert (await it.put_run(other, await it.put_model(STATE), "other")).status_code == 201
            await it.begin(RUN, STATE)
            sites, driver = await it.devices(4, sample_count=0), await it.driver()
            await it.driver("other")
            assert (await sites[3].check_in(LAYOUT, 0.0, run="other", sample_count=5)).status_code == 200
            async with all_waiting(it, sites[:3]):
                await until("a run that misses nobody", lambda: (driver.state.why, driver.state.missing) == (SOON, ()))
                assert (await sites[3].send("GET", "/v1/runs")).status_code == 200
                driver.wake()
                await until("a run that misses the agent", lambda: driver.state.missing == MISSING)

    asyncio.run(scenario())


def test_a_run_file_can_switch_the_wait_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        run = RUN.replace("[rounds]", "[rounds]\nwait_for_all_s = 0", 1)
        async with house(tmp_path, clock) as it:
            await it.begin(run, STATE)
            sites, driver = await it.devices(4, sample_count=0), await it.driver()
            async with all_waiting(it, sites[:3]):
                await until("a run that waits as long as its plan says", lambda: driver.state.why == SOON)
                assert (driver.state.missing, driver.state.waits_until) == ((), None)

    asyncio.run(scenario())


def test_a_later_round_waits_for_a_site_that_is_up_and_not_for_one_that_is_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(count=3, window_s=100.0), STATE)
            sites, driver = await it.devices(4, sample_count=0), await it.driver()
            await Attempt.of(it, clock, sites).go()
            async with all_waiting(it, sites[:3]):
                await until("a round that misses a site that is up", lambda: driver.state.missing == MISSING)
                assert driver.state.waits_until == clock.now() + UP_S
                clock.late_s += UP_S
                driver.wake()
                await until("a round that is open", lambda: driver.state.phase == "training")
            await Attempt.of(it, clock, sites[:3], 2).go()
            async with all_waiting(it, sites[:3]):
                if not it.state.services.replicas.is_alone:  # the site may be up at another replica
                    await until("a round with a full minimum", lambda: _waits(driver, clock))
                    clock.late_s += driver.plan.patience_s
                    driver.wake()
                # With one coordinator the clock stands, so patience has not run out.
                await until("a round that does not wait", lambda: driver.state.phase == "training")
            assert [sorted(fates(record)) for record in await it.ended(2)] == [
                ["d0", "d1", "d2", "d3"],
                ["d0", "d1", "d2"],
            ]

    asyncio.run(scenario())


def test_no_round_waits_for_more_clients_than_the_run_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        run = secure_run(count=2, window_s=100.0, over_selection=1.25)  # asks five
        async with house(tmp_path, clock) as it:
            await it.begin(run, STATE)
            sites, driver = await it.devices(4, sample_count=0), await it.driver()
            for number in (1, 2):
                async with all_waiting(it, sites):
                    if not it.state.services.replicas.is_alone:  # others may wait at another replica
                        await until("a round with a full minimum", lambda: _waits(driver, clock))
                        clock.late_s += driver.plan.patience_s
                        driver.wake()
                    # With one coordinator the clock stands, so patience has not run out.
                    await until("a round that does not wait", lambda: driver.state.phase == "training")
                await Attempt.of(it, clock, sites, number).go()

    asyncio.run(scenario())


def test_a_later_round_does_not_wait_for_a_site_that_is_only_up_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(count=3, window_s=100.0), STATE)
            sites, driver = await it.devices(4, sample_count=0), await it.driver()
            if not it.state.services.replicas.is_alone:
                return  # of other replicas' clients only their last contact of any kind is known
            await Attempt.of(it, clock, sites).go()
            clock.late_s += UP_S  # since it was heard about this run
            assert (await sites[3].send("GET", "/v1/runs")).status_code == 200
            async with all_waiting(it, sites[:3]):
                await until("a round that does not wait", lambda: driver.state.phase == "training")

    asyncio.run(scenario())
