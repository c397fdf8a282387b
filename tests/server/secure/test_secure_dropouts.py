"""Clients that fall silent, in every phase: up to n - t of them are survived, to the bit; more are said, and the next
attempt begins afresh."""

import asyncio
from itertools import product
from pathlib import Path

import pytest

from tests.federations.secure_cohort import STATE, Attempt, fates, secure_run
from tests.federations.secure_device import LeftOut, SecureDevice
from tests.federations.server_device import AttendedClock, house, problem
from umbel.aggregation.secagg.parameters import parameters_for
from umbel.aggregation.secagg.turns import Phase

pytestmark = pytest.mark.usefixtures("any_database_in_time")
N, T = 7, 5
REASONS = {
    Phase.ADVERTISE_KEYS: "4 of at least 5 clients have advertised keys in time",
    Phase.SHARE_KEYS: "4 of at least 5 clients have shared their keys in time",
    Phase.MASKED_INPUT: "the window of 600 s is over with 4 of at least 5 reports",
    Phase.CONSISTENCY_CHECK: "4 of at least 5 clients have signed who is in the sum in time",
    Phase.UNMASKING: "the sum could not be unmasked in time: fewer than 5 of 7 clients revealed shares",
}


def test_seven_clients_need_five() -> None:
    assert parameters_for(N).t == T


def test_nobody_falls_silent(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=N, minimum=T), STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            await attempt.go()
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], range(N)))
            assert record["partial"] == 3, "0, 3 and 6 did part of their steps"
            assert record["sample_count"] == sum(one.work.sample_count for one in attempt.parties)

    asyncio.run(scenario())


@pytest.mark.parametrize(("phase", "n_silent"), list(product(Phase, (1, N - T))), ids=str)
def test_up_to_n_minus_t_are_survived(phase: Phase, n_silent: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=N, minimum=T), STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            silent = range(1, 1 + n_silent)
            await attempt.go(silent, phase)
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            are_in_the_sum = phase in (Phase.CONSISTENCY_CHECK, Phase.UNMASKING)
            counted = [i for i in range(N) if are_in_the_sum or i not in silent]
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], counted))
            assert record["sample_count"] == sum(attempt.parties[i].work.sample_count for i in counted)
            assert record["reported"] == len(counted)

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", list(Phase), ids=str)
def test_one_more_is_said_and_the_next_attempt_is_a_new_one(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=N, minimum=T), STATE)
            devices = await it.devices(N, sample_count=0)
            first = Attempt.of(it, clock, devices)
            await first.go(range(1, N - T + 2), phase)
            [record] = await it.ended(1)
            assert not record["committed"]
            assert record["reason"] == REASONS[phase]
            second = Attempt.of(it, clock, devices, 2)
            await second.go()
            again = (await it.ended(2))[1]
            assert again["committed"], again["reason"]
            assert again["attempt"] == 2
            assert (await it.model(again["model_sha256"]))["w"].equal(second.model(STATE["w"], range(N)))
            offers = [one.parties[0].offer.secure for one in (first, second)]
            assert offers[0] is not None
            assert offers[1] is not None
            assert offers[0].attempt_id != offers[1].attempt_id
            assert offers[0].opening_commitment != offers[1].opening_commitment

    asyncio.run(scenario())


def test_one_after_another_falls_silent_until_no_more_may(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=N, minimum=4), STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            await attempt.each(SecureDevice.begin)
            left = list(range(N))  # the roster is of six, of whom five are t: one more after it may go
            for phase, falls_silent in zip(Phase, ((3,), (), (5,), (), ()), strict=True):
                left = [i for i in left if i not in falls_silent]
                assert await attempt.speak(phase, left)
                if falls_silent:
                    await attempt.run_out()
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], left))

    asyncio.run(scenario())


def test_who_is_too_late_for_keys_is_released_and_hears_no_more_of_the_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=4), STATE)
            attempt = Attempt.of(it, clock, await it.devices(4, sample_count=0))
            await attempt.each(SecureDevice.begin)
            late = attempt.parties[2]
            url = f"/v1/assignments/{late.offer.id}"
            waiting = asyncio.create_task(late.get("share-keys"))
            training = asyncio.create_task(late.device.send("GET", f"{url}?wait_s=20"))
            await attempt.speak(Phase.ADVERTISE_KEYS, (0, 1, 3))
            await attempt.run_out()
            with pytest.raises(LeftOut, match="continues without this client"):
                await waiting
            status = (await training).json()
            assert status["state"] == "closed"
            assert "not advertised keys in time" in status["reason"]
            assert problem(await late.put("advertise-keys", late.party.advertise())) == "assignment-closed"
            refused = await late.device.upload(late.offer.id, b"u" * 64)
            assert problem(refused) == "assignment-closed"
            for phase in list(Phase)[1:]:
                assert await attempt.speak(phase, (0, 1, 3))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            [told] = [one for one in record["clients"] if one["client"] == "d2"]
            assert "not advertised keys in time" in told["reason"]
            assert told["fate"] not in ("accepted", "partial")

    asyncio.run(scenario())


def test_who_is_left_over_of_an_over_selection_is_told_and_its_masks_come_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=5, minimum=4, over_selection=1.2), STATE)
            attempt = Attempt.of(it, clock, await it.devices(6, sample_count=0))
            await attempt.each(SecureDevice.begin)
            await attempt.speak(Phase.ADVERTISE_KEYS, range(6))
            await attempt.speak(Phase.SHARE_KEYS, range(6))
            last = attempt.parties[5]
            await last.hear()
            await attempt.speak(Phase.MASKED_INPUT, range(5))
            told = await last.device.send("GET", f"/v1/assignments/{last.offer.id}?wait_s=0")
            assert "the target of 5" in told.json()["reason"]
            answer = await last.report(last.masked(attempt.changes[5]))
            assert answer.json()["outcome"] == "surplus"
            with pytest.raises(LeftOut):
                await last.get("consistency-check")
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(5))
            await attempt.speak(Phase.UNMASKING, range(5))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert fates(record)["d5"] == "released"
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], range(5)))

    asyncio.run(scenario())


def test_who_declines_in_mid_exchange_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=6, minimum=4), STATE)
            attempt = Attempt.of(it, clock, await it.devices(6, sample_count=0))
            await attempt.each(SecureDevice.begin)
            await attempt.speak(Phase.ADVERTISE_KEYS, range(6))
            await attempt.speak(Phase.SHARE_KEYS, range(6))
            assert (await attempt.parties[0].decline("on battery")).status_code == 204
            for phase in list(Phase)[2:]:
                assert await attempt.speak(phase, range(1, 6))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert clock.late_s == 0.0, "nobody was waited for"
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], range(1, 6)))

    asyncio.run(scenario())


def test_who_refuses_the_sum_is_not_waited_for_though_the_coordinator_is_restarted(tmp_path: Path) -> None:
    """Its update stays in the sum: the others take its mask off."""

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=6, minimum=4), STATE)
            attempt = Attempt.of(it, clock, await it.devices(6, sample_count=0))
            await attempt.each(SecureDevice.begin)
            for phase in list(Phase)[:3]:
                assert await attempt.speak(phase, range(6))
            assert (await attempt.parties[0].decline("not with so few")).status_code == 204
        async with house(tmp_path, clock) as it:
            attempt.move_to(it)
            one = attempt.parties[0]
            signed = await one.put("consistency-check", one.party.agree(await one.get("consistency-check")))
            assert problem(signed) == "assignment-closed", "it has said that it will not"
            assert await attempt.speak(Phase.CONSISTENCY_CHECK, range(1, 6))
            assert attempt.driver.state.exchange.phase is Phase.UNMASKING, "nobody was waited for"
            assert await attempt.speak(Phase.UNMASKING, range(1, 6))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert fates(record)["d0"] in ("accepted", "partial")
            assert (await it.model(record["model_sha256"]))["w"].equal(attempt.model(STATE["w"], range(6)))

    asyncio.run(scenario())


def test_a_report_that_counts_is_declined_only_while_signatures_are_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(target=4), STATE)
            attempt = Attempt.of(it, clock, await it.devices(4, sample_count=0))
            one = attempt.parties[0]
            await attempt.each(SecureDevice.begin)
            for phase in list(Phase)[:2]:
                assert await attempt.speak(phase, range(4))
            await attempt.speak(Phase.MASKED_INPUT, (0,))
            assert (await one.decline("too early")).status_code == 204
            await attempt.speak(Phase.MASKED_INPUT, range(1, 4))
            await attempt.speak(Phase.CONSISTENCY_CHECK, (0,))
            assert (await one.decline("it has signed")).status_code == 204
            await attempt.speak(Phase.CONSISTENCY_CHECK, range(1, 4))
            assert (await one.decline("too late")).status_code == 204
            assert attempt.driver.state.exchange.refused == {}
            await attempt.speak(Phase.UNMASKING, range(4))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]

    asyncio.run(scenario())
