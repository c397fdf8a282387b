"""Two coordinators over one PostgreSQL: the member list that one was given counts at the other before long."""

import asyncio
from pathlib import Path

from tests.federations.server_device import LateClock
from tests.server.devices.test_member_lists import bound_run, list_of, put_run, text_of, told
from tests.server.replicas.test_replicas_together import at, pair
from tests.server.secure.test_secure_rounds import LAYOUT, STATE
from tests.servers.postgres import Cluster
from umbel.server.devices.fitness import LOOK_AGAIN_S


def test_a_list_that_another_replica_was_given_counts_before_long(tmp_path: Path, postgresql: Cluster) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with pair(tmp_path, postgresql.new_database(), clock) as (one, other):
            *members, stranger = await one.devices(5, sample_count=0)
            listed = list_of(*members)
            await one.begin(bound_run(listed), STATE)
            knocks = at(stranger, other)
            assert (await knocks.check_in(LAYOUT, wait_s=0.0, sample_count=0)).status_code == 200
            assert (await put_run(one, bound_run(listed), text_of(listed))).status_code == 200
            await told(stranger)
            clock.late_s = LOOK_AGAIN_S
            await told(knocks)

    asyncio.run(scenario())
