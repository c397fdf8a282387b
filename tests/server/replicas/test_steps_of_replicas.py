"""Two replicas move one run on at the same moment: the second decides on what the first has stored."""

import asyncio
from dataclasses import replace
from pathlib import Path

from sqlalchemy import text

from tests.federations.server_device import house, run_file, small_state
from tests.servers.postgres import Cluster
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.round.states import Training
from umbel.aggregation.types import ClientId
from umbel.server.store.database import Database
from umbel.server.store.rounds import RoundStore
from umbel.server.store.stored import Change, LiveRun


async def is_waiting(database: Database) -> bool:
    """Whether a transaction of this database waits for the lock of another."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with database.reading() as tx:
        return bool((await tx.execute(text(query))).scalar_one())


def test_a_step_waits_for_the_step_of_another_replica_and_decides_on_what_that_has_stored(
    tmp_path: Path, postgresql: Cluster
) -> None:
    url = postgresql.new_database()

    async def scenario() -> None:
        async with house(tmp_path, database_url=url) as it:
            layout = await it.begin(run_file(target=3), small_state())
            await asyncio.gather(*(device.work(layout) for device in await it.devices(3)))
            rounds: RoundStore = it.state.services.rounds
            elsewhere, watching = Database(url), Database(url)
            known: LiveRun = it.state.coordinator.drivers["demo"].live
            seen = list[LiveRun]()

            async def decline() -> LiveRun:
                async with rounds.locked(known) as run:
                    seen.append(run.live)
                    assert isinstance(run.live.state, Training)
                    declined = {**run.live.state.declined, ClientId("d0"): "too busy"}
                    await run.save(Change(replace(run.live.state, declined=declined)))
                return run.live

            async with elsewhere.writing("an operator's pause") as tx:
                await tx.execute(text("SELECT name FROM runs FOR UPDATE"))
                await tx.execute(text("UPDATE runs SET status = 'paused', revision = revision + 1"))
                step = asyncio.create_task(decline())
                while not seen and not await is_waiting(watching):
                    await asyncio.wait([step], timeout=0.01)
            live = await step
            for database in (elsewhere, watching):
                await database.close()
            assert (seen[0].run.status, live.run.status) == (RunStatus.PAUSED, RunStatus.PAUSED)
            assert live.revision == known.revision + 2

    asyncio.run(scenario())
