"""A secure round waits for every site's signature. One that was killed and comes back has lost the round's keys."""

import asyncio
from pathlib import Path

import pytest

from tests.federations.secure_cohort import LAYOUT, STATE, Attempt, secure_run
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import AttendedClock, house
from umbel.aggregation.secagg.turns import Phase

pytestmark = pytest.mark.usefixtures("any_database_in_time")
N = 4


async def with_all_in(attempt: Attempt) -> None:
    """All masked updates are in, and nobody has signed yet."""
    await attempt.each(SecureDevice.begin)
    for phase in (Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS, Phase.MASKED_INPUT):
        assert await attempt.speak(phase, range(len(attempt.parties)))
    assert attempt.driver.state.phase == "closing"


def test_a_round_that_cannot_do_without_it_is_given_up_when_it_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=3, minimum=3, over_selection=1.0), STATE)
            devices = await it.devices(3, sample_count=0)
            attempt = Attempt.of(it, clock, devices)
            await with_all_in(attempt)
            assert await attempt.speak(Phase.CONSISTENCY_CHECK, range(2))
            live = (await it.progress())["live"]
            assert live["why"].startswith("waiting for d2 to sign who is in the sum: ")
            assert live["closes_in_s"] > 0
            await devices[2].check_in(LAYOUT, wait_s=0.0, sample_count=0)
            [record] = await it.ended(1)
            assert not record["committed"]
            assert record["reason"].endswith("have signed who is in the sum in time; declined by d2")

    asyncio.run(scenario())


def test_a_round_that_can_do_without_it_waits_no_longer(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=N, minimum=3, over_selection=1.0), STATE)
            devices = await it.devices(N, sample_count=0)
            attempt = Attempt.of(it, clock, devices)
            await with_all_in(attempt)
            await devices[N - 1].check_in(LAYOUT, wait_s=0.0, sample_count=0)
            assert await attempt.speak(Phase.CONSISTENCY_CHECK, range(N - 1))
            assert attempt.driver.state.exchange.phase is Phase.UNMASKING, "no deadline had to pass"
            await attempt.speak(Phase.UNMASKING, range(N - 1))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert record["reported"] == N

    asyncio.run(scenario())


def test_one_that_has_signed_may_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=N, minimum=N, over_selection=1.0), STATE)
            devices = await it.devices(N, sample_count=0)
            attempt = Attempt.of(it, clock, devices)
            await with_all_in(attempt)
            assert await attempt.speak(Phase.CONSISTENCY_CHECK, range(N))
            await devices[0].check_in(LAYOUT, wait_s=0.0, sample_count=0)
            await attempt.speak(Phase.UNMASKING, range(N))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]

    asyncio.run(scenario())
