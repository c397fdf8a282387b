"""By whom a secure attempt has failed, the next does without where it can: the silent of each phase, and dealers of
false shares."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.federations.false_dealers import ClosedDealer, WrongDealer
from tests.federations.secure_cohort import LAYOUT, STATE, Attempt, asked_again, fates, ordered, secure_run, work_of
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import AttendedClock, Device, House, Json, LateClock, house
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.messages import Unmasking
from umbel.aggregation.secagg.turns import Phase

pytestmark = pytest.mark.usefixtures("any_database_in_time")
N, N_MORE = 4, 2
SILENT = (1, 2)
RUN = secure_run(target=N, minimum=3)


async def require_that_it_does_without(it: House, clock: LateClock, devices: Sequence[Device], out: set[str]) -> None:
    """The second attempt asks all but those who are out, and makes a model."""
    second = await asked_again(it, clock, devices, 2)
    assert {one.device.name for one in second.parties} == {one.name for one in devices} - out
    await second.go()
    record = (await it.ended(2))[1]
    assert record["committed"], record["reason"]
    assert set(fates(record)) == {one.name for one in devices} - out
    assert (await it.model(record["model_sha256"]))["w"].equal(second.model(STATE["w"], range(len(second.parties))))


def reasons(record: Json) -> dict[str, str]:
    return {client["client"]: client["reason"] for client in record["clients"]}


@pytest.mark.parametrize("phase", list(Phase), ids=str)
def test_who_is_silent_down_to_failure_is_not_asked_again_while_others_wait(phase: Phase, tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            devices = await it.devices(N + N_MORE, sample_count=0)
            first = Attempt.of(it, clock, devices[:N])
            await first.each(SecureDevice.begin)
            await ordered(it, "pause")
            await first.go(SILENT, phase)
            [record] = await it.ended(1)
            assert not record["committed"]
            why = f"had not reported: {record['reason']}" if phase is Phase.MASKED_INPUT else phase.late_words
            assert [name for name, reason in reasons(record).items() if reason.endswith(why)] == ["d1", "d2"]
            await require_that_it_does_without(it, clock, devices, {"d1", "d2"})

    asyncio.run(scenario())


@pytest.mark.parametrize("is_gone", [False, True], ids=["in the sum", "gone"])
@pytest.mark.parametrize("kind", [WrongDealer, ClosedDealer])
def test_a_dealer_of_false_shares_is_named_and_not_asked_again(
    kind: type[SecureClient], tmp_path: Path, *, is_gone: bool
) -> None:
    """If it is not in the sum that was opened in vain, those who are are asked again, and no others."""

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            devices = await it.devices(N + 1, sample_count=0)
            first = Attempt.of(it, clock, devices[:N])
            first.parties[2] = SecureDevice(devices[2], LAYOUT, work_of(2), kind=kind)
            await first.each(SecureDevice.begin)
            await ordered(it, "pause")
            await first.go((2,) if is_gone else (), Phase.MASKED_INPUT)
            if kind is ClosedDealer:
                await first.run_out()
            [record] = await it.ended(1)
            assert not record["committed"]
            assert "d2" in record["reason"]
            why = "it has dealt wrong shares" if kind is WrongDealer else "shares that it dealt did not open"
            assert [name for name, reason in reasons(record).items() if why in reason] == ["d2"]
            await require_that_it_does_without(it, clock, devices, {"d2", "d4"} if is_gone else {"d2"})

    asyncio.run(scenario())


def test_who_reveals_no_share_but_its_own_is_named_and_no_honest_dealer(tmp_path: Path) -> None:
    """D3 is silent, which the others would survive."""

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            devices = await it.devices(N + 2, sample_count=0)
            first = Attempt.of(it, clock, devices[:N])
            await first.each(SecureDevice.begin)
            await ordered(it, "pause")
            for phase in list(Phase)[:-1]:
                assert await first.speak(phase, range(N))
            assert await first.speak(Phase.UNMASKING, (0, 1))
            liar = first.parties[2]
            whole = Unmasking.decode(liar.party.reveal(await liar.get("unmasking")), liar.party.index, N)
            body = Unmasking(liar.party.index, {liar.party.index: whole.shares[liar.party.index]}).encode()
            assert (await liar.put("unmasking", body)).status_code == 202
            await first.run_out()
            [record] = await it.ended(1)
            assert record["reason"] == (
                "the sum could not be unmasked in time: "
                "d2 withheld shares of clients whose other holders revealed theirs"
            )
            told = reasons(record)
            assert told["d2"].endswith("; it revealed no share of d0, d1, d3")
            assert told["d3"].endswith(Phase.UNMASKING.late_words)
            assert {told["d0"], told["d1"]} == {f"the round was abandoned: {record['reason']}"}
            await require_that_it_does_without(it, clock, devices, {"d2", "d3"})

    asyncio.run(scenario())


def test_who_was_silent_is_not_asked_again_where_others_refuse_the_sum_without_it(tmp_path: Path) -> None:
    """All three that are left would have to sign. So it ends with the first that does not, at once."""

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            devices = await it.devices(N + 1, sample_count=0)
            first = Attempt.of(it, clock, devices[:N])
            await first.each(SecureDevice.begin)
            await ordered(it, "pause")
            for phase in list(Phase)[:2]:
                assert await first.speak(phase, range(N))
            assert await first.speak(Phase.MASKED_INPUT, (0, 2, 3))
            await first.run_out()
            late_s = clock.late_s
            refusing = first.parties[0]
            await refusing.get("consistency-check")
            assert (await refusing.decline("they differ by d1 alone")).status_code == 204
            [record] = await it.ended(1)
            assert clock.late_s == late_s, "nobody was waited for"
            assert record["reason"] == ("0 of at least 3 clients have signed who is in the sum; declined by d0")
            [told] = [one for one in record["clients"] if one["client"] == "d0"]
            assert (told["fate"], told["reason"]) == ("declined", "they differ by d1 alone")
            assert (await refusing.decline("they differ by d1 alone")).status_code == 204, "again, and it is nothing"
            await require_that_it_does_without(it, clock, devices, {"d1"})

    asyncio.run(scenario())


def test_who_has_not_revealed_to_the_coordinator_that_took_over_counts_as_silent(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            await attempt.each(SecureDevice.begin)
            for phase in list(Phase)[:-1]:
                assert await attempt.speak(phase, range(N))
            assert await attempt.speak(Phase.UNMASKING, (0, 1))
        async with house(tmp_path, clock) as it:
            attempt.move_to(it)
            assert await attempt.speak(Phase.UNMASKING, (1, 3))
            await attempt.run_out()
            [record] = await it.ended(1)
            silent = [name for name, why in reasons(record).items() if why.endswith(Phase.UNMASKING.late_words)]
            assert silent == ["d0", "d2"]

    asyncio.run(scenario())


def test_a_coordinator_that_comes_when_the_time_is_up_calls_nobody_silent(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            await it.begin(RUN, STATE)
            attempt = Attempt.of(it, clock, await it.devices(N, sample_count=0))
            await attempt.each(SecureDevice.begin)
            for phase in list(Phase)[:-1]:
                assert await attempt.speak(phase, range(N))
            assert await attempt.speak(Phase.UNMASKING, (0, 1))
        clock.late_s += 600.0
        async with house(tmp_path, clock) as it:
            [record] = await it.ended(1)
            assert "fewer than 3 of 4 clients revealed shares" in record["reason"]
            assert not any(why.endswith(Phase.UNMASKING.late_words) for why in reasons(record).values())

    asyncio.run(scenario())
