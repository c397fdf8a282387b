"""A secure round of a small fleet whose sum was opened in vain is made again, by sites that keep to what they have
revealed: each has the client's own memory of its sums, and refuses what that refuses."""

import asyncio
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.federations.lifecycle_house import obeyed
from tests.federations.secure_cohort import STATE, Attempt, all_waiting, asked_again, fates, ordered, secure_run
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import AttendedClock, Device, House, LateClock, house
from tests.servers.waits import until
from umbel.aggregation.secagg.messages import decode_indices
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import ClientId, RunId
from umbel.client.errors import AttemptRefused
from umbel.client.policy.earlier_sums import EarlierSums
from umbel.client.policy.policy import SitePolicy
from umbel.client.state.secure_store import SecureStore
from umbel.client.wire.offers import SecureInvitation, read_offer

pytestmark = pytest.mark.usefixtures("any_database_in_time")
RUN = secure_run(target=5, minimum=3, over_selection=1.2, window_s=300.0)
N_ASKED, N_IN = 6, 5
SUMMED = {"d0", "d1", "d2", "d3", "d4"}


@dataclass
class Site(SecureDevice):
    """A device that gives nothing by which one of its sums would show, with another, what one client hides."""

    memory: EarlierSums | None = None

    @classmethod
    def of(cls, one: SecureDevice, directory: Path) -> "Site":
        memory = EarlierSums(RunId("demo"), SitePolicy(), SecureStore(directory / one.device.name))
        return cls(one.device, one.layout, one.work, memory=memory)

    @property
    def sums(self) -> EarlierSums:
        assert self.memory is not None
        return self.memory

    @property
    def asked(self) -> SecureInvitation:
        return read_offer(self.offer, ClientId(self.device.name), self.layout)

    async def advertise(self) -> None:
        self.sums.check_invitation(self.asked)
        await super().advertise()

    async def hear(self) -> None:
        await super().hear()
        self.sums.sending(self.asked)

    async def agree(self) -> None:
        inputs = await self.get("consistency-check")
        clients = [self.asked.context.names[i] for i in decode_indices(inputs, len(self.asked.context.cohort))]
        try:
            self.sums.check_sum(self.asked, clients)
        except AttemptRefused as refusal:
            await self.decline(refusal.public_reason)
            return
        self.sums.signing(self.asked, clients)
        await super().agree()

    async def put(self, phase: str, body: bytes, query: str = "") -> httpx.Response:
        if phase == Phase.UNMASKING:
            self.sums.revealing(self.asked)
        return await super().put(phase, body, query)


def sites(attempt: Attempt, directory: Path) -> Attempt:
    """The attempt, with the memories that its devices have there."""
    attempt.parties = [Site.of(one, directory) for one in attempt.parties]
    return attempt


async def opened_in_vain(it: House, clock: LateClock, devices: list[Device], directory: Path) -> None:
    """Six are asked, five are in the sum, two reveal shares, and the coordinator has to give up. The run is paused."""
    first = sites(Attempt.of(it, clock, devices[:N_ASKED]), directory)
    await first.each(SecureDevice.begin)
    await ordered(it, "pause")
    assert await first.speak(Phase.ADVERTISE_KEYS, range(N_ASKED))
    assert await first.speak(Phase.SHARE_KEYS, range(N_ASKED))
    for phase in (Phase.MASKED_INPUT, Phase.CONSISTENCY_CHECK):
        assert await first.speak(phase, range(N_IN))
    assert await first.speak(Phase.UNMASKING, (0, 1))
    await first.run_out()
    [record] = await it.ended(1)
    assert "the sum could not be unmasked in time" in record["reason"]
    assert record["reported"] == N_IN


async def report_in_turn(attempt: Attempt) -> list[int]:
    """The last of them first, until the round has enough; who has."""
    reported = list[int]()
    for i in reversed(range(len(attempt.parties))):
        if attempt.driver.state.phase == "training":
            assert await attempt.speak(Phase.MASKED_INPUT, [i])
            reported.append(i)
    return reported


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True], ids=["one coordinator", "another coordinator"])
def test_a_round_that_was_opened_in_vain_is_made_again_by_the_very_same_clients(
    tmp_path: Path, *, is_restarted: bool
) -> None:
    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path / "house", clock) as it:
            await it.begin(RUN, STATE)
            devices = await it.devices(N_ASKED, sample_count=0)
            await opened_in_vain(it, clock, devices, tmp_path)
            if not is_restarted:
                await made_again(it, clock, devices)
        if is_restarted:
            async with house(tmp_path / "house", clock) as it:
                for one in devices:
                    one.http = it.http
                await made_again(it, clock, devices)

    async def made_again(it: House, clock: LateClock, devices: list[Device]) -> None:
        second = sites(await asked_again(it, clock, devices, 2), tmp_path)
        everybody = range(len(second.parties))
        await second.each(SecureDevice.begin)
        for phase in (Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS):
            assert await second.speak(phase, everybody)
        reported = await report_in_turn(second)
        assert await second.speak(Phase.CONSISTENCY_CHECK, reported)
        await second.speak(Phase.UNMASKING, reported)
        record = (await it.ended(2))[1]
        assert record["committed"], record["reason"]
        assert {name for name, fate in fates(record).items() if fate in ("accepted", "partial")} == SUMMED
        assert (await it.model(record["model_sha256"]))["w"].equal(second.model(STATE["w"], everybody))

    asyncio.run(scenario())


def test_who_of_them_is_awaited_is_said_and_if_the_operator_removes_it_anybody_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was opened in vain is not forgotten for an attempt that the operator cuts short."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path / "house", clock) as it:
            await it.begin(RUN, STATE)
            devices = await it.devices(N_ASKED + 1, sample_count=0)
            await opened_in_vain(it, clock, devices, tmp_path)
            present = [one for one in devices if one.name != "d4"]
            async with all_waiting(it, present):
                await ordered(it, "resume")
                driver = it.state.coordinator.drivers["demo"]
                await until("a run that waits for d4", lambda: "s more for d4" in driver.state.why)
                assert "s more for d4" in (await it.progress())["live"]["why"]
                removed = await it.http.delete("/v1/admin/clients/d4", headers=it.admin)
                assert removed.status_code == 204
                await until("a round that is open", lambda: driver.state.phase == "training")
            assert set(driver.state.cohort) == {one.name for one in present}
            why = (await it.progress())["live"]["why"]
            assert why.startswith("0 of 5 reports are in; ")
            assert why.endswith(
                "sites may refuse, because a sum over this model was already unmasked; "
                "the operator has removed clients of that sum: d4"
            )
            assert re.search(
                r"attempt 2 opened: 6 clients asked, .*; the operator has removed clients of that sum: d4", caplog.text
            )
            await obeyed(it, "pause", now=True)
            assert driver.state.phase == "recruiting"
            assert driver.state.before
            assert [set(one.clients) for one in driver.state.before.opened] == [SUMMED]

    asyncio.run(scenario())
