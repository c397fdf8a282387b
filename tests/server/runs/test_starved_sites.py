"""Sites that had next to no time: what they have done goes into no sum, and so the sum is no single site's update."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.federations.secure_cohort import LAYOUT, STATE, Attempt, secure_run
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import AttendedClock, house
from umbel.aggregation.secagg.numbers.contribution import LocalWork, TooLittleWork
from umbel.aggregation.secagg.parameters import parameters_for
from umbel.aggregation.secagg.turns import ASKED_SHARE, KEYS_SHARE, Phase

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("any_database_in_time")]
N, PLANNED = 10, 1500
WINDOW_S = 600.0  # of the tests' own clock: a machine that is busy takes seconds for a step
ALL_OF_IT = secure_run(target=N, minimum=3, window_s=WINDOW_S).replace("minimum_work = 0.5\n", "")
HALF = secure_run(target=N, minimum=3, window_s=WINDOW_S)


async def train(attempt: Attempt, steps: Sequence[int]) -> list[int]:
    """Each has done so many of its steps. Who sends its update; the others decline, as `contribution` has it."""
    for one, done in zip(attempt.parties, steps, strict=True):
        one.work = LocalWork(10, done, PLANNED, {"loss": 0.5})
    await attempt.each(SecureDevice.begin)
    everybody = range(len(attempt.parties))
    await attempt.speak(Phase.ADVERTISE_KEYS, everybody)
    await attempt.speak(Phase.SHARE_KEYS, everybody)
    await attempt.each(SecureDevice.hear)
    sent = list[int]()
    for i, one in enumerate(attempt.parties):
        try:
            update = one.masked(attempt.changes[i])
        except TooLittleWork:
            await one.decline("this client does not take part in this attempt")
            continue
        answer = await one.send_input(update)
        if answer.json()["outcome"] == "accepted":
            sent.append(i)
    return sent


@pytest.mark.parametrize("victim", [0, 7])
def test_nine_that_are_starved_and_one_that_is_not_have_no_sum(victim: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(ALL_OF_IT, STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            steps = [PLANNED if i == victim else 1 for i in range(N)]
            assert set(await train(attempt, steps)) <= {victim}
            [record] = await it.ended(1)
            assert not record["committed"], "one update alone is never unmasked"
            assert record["model_sha256"] is None
            assert [one["fate"] for one in record["clients"]].count("declined") == N - 1

    asyncio.run(scenario())


def test_nor_are_there_two_sums_that_differ_by_what_one_has_done(tmp_path: Path) -> None:
    """All starved at first, then all but one: the difference would be that one's work, less the others' chance."""

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(ALL_OF_IT, STATE)
            devices = await it.devices(N, sample_count=0)
            first = Attempt.of(it, clock, devices)
            assert await train(first, [1] * N) == []
            [record] = await it.ended(1)
            assert not record["committed"]
            second = Attempt.of(it, clock, devices, 2)
            assert set(await train(second, [PLANNED, *[1] * (N - 1)])) <= {0}
            assert not (await it.ended(2))[1]["committed"]

    asyncio.run(scenario())


def test_with_a_floor_of_a_half_the_sum_is_of_those_that_did_half_and_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(HALF, STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            steps = [PLANNED, 750, 749, 1, 1499, 750, 800, 1000, 1200, 1400]
            enough = [i for i, done in enumerate(steps) if 2 * done >= PLANNED]
            assert len(enough) == N - 2 >= parameters_for(N).t
            assert await train(attempt, steps) == enough
            await attempt.speak(Phase.CONSISTENCY_CHECK, enough)
            await attempt.speak(Phase.UNMASKING, enough)
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], enough))
            assert record["partial"] == sum(steps[i] < PLANNED for i in enough)

    asyncio.run(scenario())


def test_nobody_is_asked_so_late_that_clients_would_take_no_part(tmp_path: Path) -> None:
    """An honest coordinator asks while keys are taken, and sites take part with half of the window left, or more."""
    assert 1 - KEYS_SHARE > ASKED_SHARE

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(ALL_OF_IT, STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            *others, late = attempt.parties
            await attempt.each(SecureDevice.begin)
            await attempt.speak(Phase.ADVERTISE_KEYS, range(len(others)))
            keys_end_at = attempt.driver.state.exchange.ends_at
            clock.late_s = keys_end_at - time.time() - 0.25
            last = await late.device.work(LAYOUT)
            assert ASKED_SHARE * WINDOW_S < last["window_s"] < WINDOW_S, "it comes back, and is still in time"
            await attempt.run_out()
            answer = (await late.device.check_in(LAYOUT, wait_s=0.0)).json()
            assert answer["assignment"] is None, answer
            assert (await others[0].device.work(LAYOUT))["window_s"] > ASKED_SHARE * WINDOW_S

    asyncio.run(scenario())
