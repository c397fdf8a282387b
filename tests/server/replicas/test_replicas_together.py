"""Two coordinators over one PostgreSQL, in one process: what happens at one is known at the other before long."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import text

from tests.federations.server_device import (
    Device,
    House,
    Json,
    UntimedClock,
    house,
    problem,
    repr_digest,
    run_file,
    small_state,
    stored_updates,
    update_of,
)
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S, until, until_told
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.round.states import Training
from umbel.aggregation.types import ClientId
from umbel.server.clock import Clock
from umbel.server.store.database import Database
from umbel.server.store.rounds import RoundStore
from umbel.server.store.stored import Change, LiveRun

STOP = "/v1/admin/runs/demo/stop"


@pytest.fixture
def url(postgresql: Cluster) -> str:
    return postgresql.new_database()


@asynccontextmanager
async def pair(tmp_path: Path, url: str, clock: Clock | None = None) -> AsyncGenerator[tuple[House, House]]:
    shared: dict[str, Any] = {
        "database_url": url,
        "blobs": str(tmp_path / "blobs"),
        "admin_key_file": tmp_path / "admin.key",
        "audit_key_file": tmp_path / "audit.key",
    }
    async with house(tmp_path / "a", clock, **shared) as one, house(tmp_path / "b", clock, **shared) as other:
        yield one, other


def at(device: Device, it: House) -> Device:
    """The same client, speaking to this coordinator."""
    return Device(it.http, device.name, device.run, device.sample_count, device.key)


def test_one_token_enrols_one_client_wherever_it_is_used(tmp_path: Path, url: str) -> None:
    async def scenario() -> None:
        async with pair(tmp_path, url) as (one, other):
            for i in range(5):
                [token] = await one.tokens(1)
                rivals = Device(one.http, f"left-{i}"), Device(other.http, f"right-{i}")
                answers = await asyncio.gather(*(rival.enrol(token) for rival in rivals))
                assert sorted(answer.status_code for answer in answers) == [200, 409]
                refused = next(answer for answer in answers if answer.status_code == 409)
                assert problem(refused) == "token-used"

    asyncio.run(scenario())


def test_the_same_run_made_at_both_at_once_is_one_run(tmp_path: Path, url: str) -> None:
    async def scenario() -> None:
        async with pair(tmp_path, url) as (one, other):
            model = await one.put_model(small_state())
            answers = await asyncio.gather(*(it.put_run(run_file(), model) for it in (one, other)))
            assert sorted(answer.status_code for answer in answers) == [200, 201]

    asyncio.run(scenario())


def test_a_stop_and_a_removal_at_one_are_known_at_the_other(tmp_path: Path, url: str) -> None:
    async def scenario() -> None:
        async with pair(tmp_path, url, UntimedClock()) as (one, other):
            layout = await one.begin(run_file(target=3, minimum=3), small_state())
            gone, device = await one.devices(2)
            held = [asyncio.create_task(at(it, other).check_in(layout, wait_s=20.0)) for it in (gone, device)]
            bells = (await other.driver()).bells
            await until("both requests held open", lambda: bells.is_heard("d0") and bells.is_heard("d1"))
            await one.http.delete("/v1/admin/clients/d0", headers=one.admin)
            assert problem(await asyncio.wait_for(held[0], LIMIT_S)) == "client-removed"
            await one.http.post("/v1/admin/runs/demo/stop", json={"reason": "enough"}, headers=one.admin)
            assert (await asyncio.wait_for(held[1], LIMIT_S)).json()["run_status"] == "stopped"

    asyncio.run(scenario())


def test_a_round_is_taken_part_in_at_either_and_the_last_model_is_known_at_both(tmp_path: Path, url: str) -> None:
    async def scenario() -> None:
        async with pair(tmp_path, url) as (one, other):
            layout = await one.begin(run_file(target=2, minimum=2), small_state())
            devices = await one.devices(2)
            held = [at(device, it).work(layout) for device, it in zip(devices, (one, other), strict=True)]
            assignments = await asyncio.gather(*held)
            update = update_of(layout, torch.ones(layout.n_values))
            for device, assignment in zip(devices, assignments, strict=True):
                fields = {"Upload-Complete": "?0"}
                url_ = f"/v1/assignments/{assignment['id']}/update"
                headers = device.headers("POST", url_, update[:80]) | fields | _whole(update)
                begun = await one.http.post(url_, content=update[:80], headers=headers)
                assert begun.status_code == 201, begun.text
                rest = await at(device, other).patch(assignment["id"], update[80:], 80, is_last=True)
                assert rest.status_code == 204, rest.text
            answers = [
                (await at(device, it).report(assignment["id"], update)).json()["outcome"]
                for device, assignment, it in zip(devices, assignments, (other, one), strict=True)
            ]
            assert answers == ["accepted", "accepted"]
            [record] = await one.ended(1)
            assert record["committed"]
            assert record["reported"] == 2
            for it in (one, other):
                progress = await until_told("the run's end", lambda it=it: finished(it))  # type: ignore[misc]
                assert progress["run"]["model"]["sha256"] == record["model_sha256"]
                assert progress["run"]["model"]["version"] == 1

    asyncio.run(scenario())


async def finished(it: House) -> Json | None:
    """What this coordinator says of a run that is finished."""
    progress = await it.progress()
    return progress if progress["run"]["status"] == "finished" else None


def _whole(update: bytes) -> dict[str, str]:
    return {"Upload-Length": str(len(update)), "Repr-Digest": repr_digest(update)}


@pytest.mark.usefixtures("any_database")
def test_a_chunk_whose_commit_was_not_heard_of_is_not_removed(tmp_path: Path) -> None:
    """The connection to the database is lost when the commit is under way: it may count, and here it does."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            update = update_of(layout, torch.ones(layout.n_values))
            uploads = it.state.services.uploads
            add_chunk = uploads.add_chunk

            async def lost(*arguments: object) -> None:
                await add_chunk(*arguments)
                raise ConnectionResetError

            uploads.add_chunk = lost
            assert problem(await device.upload(assignment["id"], update)) == "internal-error"
            del uploads.add_chunk
            assert len(stored_updates(it.settings)) == 1
            assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
            [record] = await it.ended(1)
            assert record["committed"]

    asyncio.run(scenario())


def test_over_one_database_each_request_is_taken_once(tmp_path: Path, url: str) -> None:
    async def scenario() -> None:
        async with pair(tmp_path, url) as (one, other):
            layout = await one.begin(run_file(target=2, minimum=2), small_state())
            [device] = await one.devices(1)
            body = b'{"run": "demo", "sample_count": 1, "layout_digest": "%s", "wait_s": 0}' % layout.digest.encode()
            headers = device.headers("POST", "/v1/check-ins", body)
            sent: list[httpx.Response] = await asyncio.gather(
                *(it.http.post("/v1/check-ins", content=body, headers=headers) for it in (one, other))
            )
            assert sorted(answer.status_code for answer in sent) == [200, 401]

    asyncio.run(scenario())


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


def test_an_agent_at_one_coordinator_sees_the_runs_that_are_made_and_stopped_at_the_other(
    tmp_path: Path, url: str
) -> None:
    async def scenario() -> None:
        async with pair(tmp_path, url) as (one, other):
            [device] = await one.devices(1)
            agent, names = at(device, other), list[list[str]]()
            mark = (await agent.send("GET", "/v1/runs")).json()["mark"]
            for change in (one.begin(run_file(), small_state()), one.http.post(STOP, json={}, headers=one.admin)):
                asked = asyncio.create_task(agent.send("GET", f"/v1/runs?mark={mark}&wait_s=30"))
                await until("a held request", lambda: other.state.open_runs._n_held == 1)
                await change
                await until("the answer", asked.done)
                mark = asked.result().json()["mark"]
                names.append([run["name"] for run in asked.result().json()["runs"]])
            assert names == [["demo"], []]

    asyncio.run(scenario())
