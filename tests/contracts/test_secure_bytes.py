"""What the record of a secure round says of bytes is what its clients have seen go by, and what the simulator says.

Of three clients the shares of all are needed, so that no message comes when the sum is unmasked already.
"""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.federations.secure_cohort import LAYOUT, STATE, Attempt, secure_run
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import AttendedClock, House, Json, LateClock, house, rows
from tests.server.replicas.test_replicas_together import pair
from tests.servers.meter import Meter, MeteredTransport
from tests.servers.postgres import Cluster
from tests.servers.waits import until
from umbel.aggregation.round.states import Training
from umbel.aggregation.secagg.masked_input import MaskedReader
from umbel.aggregation.secagg.numbers.composition import composition_of
from umbel.aggregation.secagg.turns import Phase
from umbel.sim.federation.window import Cohort, SecureWindow
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.fates import CohortAsk
from umbel.sim.fleet.section import FleetSection, NetworkSection, SpeedSection

N = 3
ALIKE = FleetSection(
    speed=SpeedSection(step_s=1.0, spread=0.0, jitter=0.0), network=NetworkSection(spread=0.0, jitter=0.0)
)


class Metered:
    """An attempt whose devices have a meter each, wherever they speak to."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.meters = {one.device.name: Meter() for one in attempt.parties}
        for one in attempt.parties:
            self.connect(one, attempt.it)

    @classmethod
    async def begun(cls, it: House, clock: LateClock) -> "Metered":
        """Everybody has its assignment and the model."""
        await it.begin(secure_run(target=N, minimum=N), STATE)
        metered = cls(Attempt.of(it, clock, await it.devices(N, sample_count=0)))
        await metered.attempt.each(SecureDevice.begin)
        await metered.attempt.each(_fetch_model)
        return metered

    def connect(self, one: SecureDevice, it: House) -> None:
        """Have this device speak to this coordinator from now on."""
        transport = MeteredTransport(httpx.ASGITransport(it.app), self.meters[one.device.name])
        one.device.http = httpx.AsyncClient(transport=transport, base_url="http://umbel", timeout=30.0)

    async def speak(self, *phases: Phase) -> None:
        for phase in phases:
            assert await self.attempt.speak(phase, range(N))

    @property
    def counted(self) -> dict[str, tuple[int, int]]:
        return {name: (meter.up, meter.down) for name, meter in self.meters.items()}


async def _fetch_model(one: SecureDevice) -> None:
    answer = await one.device.send("GET", f"/v1/models/{one.offer.model.sha256}")
    assert answer.status_code == 200, answer.text


def told(record: Json) -> dict[str, tuple[int, int]]:
    return {one["client"]: (one["bytes_up"], one["bytes_down"]) for one in record["clients"]}


def simulated(opened: Training, offer: SecureDevice, model_bytes: int) -> dict[str, tuple[int, int]]:
    """The same attempt in virtual time, with a fleet of which nobody is lost."""
    composition = composition_of(offer.offer, LAYOUT)
    update_bytes = MaskedReader(composition).update_bytes.start
    ask = CohortAsk(np.full(N, 4), 1, np.array([model_bytes]), np.array([update_bytes]), opened.plan.window_s)
    fates = build_fleet(ALIKE, 1, Path()).fates(np.arange(N), 1, 1, opened.opened_at, ask)
    played = SecureWindow(opened, Cohort(sorted(opened.cohort), fates, ()), composition).play({})
    members = played.book({}, {}).members
    return {name: (member.bytes_up, member.bytes_down) for name, member in members.items()}


def test_the_simulator_and_the_coordinator_count_the_same_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            metered = await Metered.begun(it, LateClock())
            opened, one = metered.attempt.driver.state, metered.attempt.parties[0]
            await metered.speak(*Phase)
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert told(record) == metered.counted
            assert told(record) == simulated(opened, one, record["model_bytes"])

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database_in_time")
def test_a_coordinator_that_has_gone_on_tells_what_was_sent_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        phases = list(Phase)
        async with house(tmp_path) as it:
            metered = await Metered.begun(it, LateClock())
            await metered.speak(*phases[:3])
        async with house(tmp_path) as it:
            metered.attempt.it = it
            for one in metered.attempt.parties:
                metered.connect(one, it)
            await metered.speak(*phases[3:])
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            assert told(record) == metered.counted

    asyncio.run(scenario())


def test_the_record_of_an_attempt_that_is_given_up_has_what_was_sent_until_then(tmp_path: Path) -> None:
    """One that never shares its keys is waited for in vain."""

    async def scenario() -> None:
        clock = AttendedClock()
        async with house(tmp_path, clock) as it:
            metered = await Metered.begun(it, clock)
            await metered.speak(Phase.ADVERTISE_KEYS)
            await metered.attempt.speak(Phase.SHARE_KEYS, (0, 1))
            await metered.attempt.run_out()
            [record] = await it.ended(1)
            assert not record["committed"]
            assert told(record) == metered.counted
            assert record["clients"][2]["bytes_up"] == 132, "its keys"

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_was_sent_to_other_coordinators_is_in_the_record_too(
    postgresql: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one that does not close the round has counted it in the last moment, and looks around no more."""

    async def scenario() -> None:
        async with pair(tmp_path, postgresql.new_database()) as (one, other):
            metered = await Metered.begun(one, LateClock())
            attempt, phases = metered.attempt, list(Phase)
            for phase, it in zip(phases[:-1], (other, one, other, one), strict=True):
                for party in attempt.parties:
                    metered.connect(party, it)
                await metered.speak(phase)
            leader = await leads(one, other)
            follower = other if leader is one else one
            for party, it in zip(attempt.parties, (follower, follower, leader), strict=True):
                metered.connect(party, it)
            drivers = [await it.driver() for it in (one, other)]
            await until(
                "unmasking at both", lambda: all(one.state.exchange.phase is Phase.UNMASKING for one in drivers)
            )
            for it in (one, other):
                it.state.coordinator._looking.cancel()
                await asyncio.wait([it.state.coordinator._looking])
            await attempt.speak(Phase.UNMASKING, (0, 1))
            await until("bytes that are stored", lambda: not any(one._traffic.assignments for one in drivers))
            await attempt.speak(Phase.UNMASKING, (2,))
            [record] = await one.ended(1)
            assert record["committed"], record["reason"]
            assert told(record) == metered.counted

    asyncio.run(scenario())


async def leads(*houses: House) -> House:
    """Which of these coordinators closes the round, once one does."""

    def found() -> House | None:
        holders = {row[1] for row in rows(houses[0].settings)["leases"] if str(row[0]).startswith("close")}
        return next((it for it in houses if it.state.services.replicas.id in holders), None)

    return await until("a coordinator that closes the round", found)
