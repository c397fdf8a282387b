"""A phase of keys goes on without a site that waited for the others' keys and is silent now."""

import asyncio
from pathlib import Path

from tests.federations.secure_cohort import STATE, Attempt, fates, secure_run
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import LateClock, house, pass_time
from tests.servers.waits import until
from umbel.aggregation.round.silence import quiet_s
from umbel.aggregation.secagg.turns import Phase

WINDOW_S = 600.0
QUIET_S = quiet_s(WINDOW_S)


def test_keys_are_not_awaited_of_a_site_that_has_died_while_it_waited(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(secure_run(window_s=WINDOW_S), STATE)
            attempt = Attempt.of(it, clock, await it.devices(4, sample_count=0))
            driver, dead = attempt.driver, attempt.parties[3]
            await attempt.each(SecureDevice.begin)
            await attempt.each(lambda one: one.advertise(), (0, 1, 3))
            asking = asyncio.create_task(dead.get("share-keys"))
            await until("a site that waits for keys", lambda: driver.bells.is_heard(dead.device.name))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await attempt.each(lambda one: one.advertise(), (2,))
            await attempt.each(lambda one: one.share(), (0, 1))
            await pass_time(it, clock, QUIET_S + 1.0)
            assert driver.state.exchange.phase is Phase.SHARE_KEYS, "two are too few"
            await attempt.each(lambda one: one.share(), (2,))
            await until("the phase after keys", lambda: driver.state.exchange.phase is Phase.MASKED_INPUT)
            for phase in (Phase.MASKED_INPUT, Phase.CONSISTENCY_CHECK, Phase.UNMASKING):
                await attempt.speak(phase, (0, 1, 2))
            (record,) = await it.ended(1)
        assert record["committed"], record["reason"]
        assert fates(record)[dead.device.name] != "accepted"

    asyncio.run(scenario())
