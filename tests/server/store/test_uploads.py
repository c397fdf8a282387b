"""Chunks that come together count in one transaction, each for itself."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import text

from tests.federations.server_device import House, house, run_file, small_state, update_of
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S
from umbel.aggregation.types import AssignmentId
from umbel.server.store.database import Database
from umbel.server.store.stored import Chunk, StoredUpload
from umbel.server.store.uploads import Arrived, UploadMoved, UploadOver, UploadStore

NEW = StoredUpload(100, 0, "0" * 64, is_complete=False)


async def assignments(it: House, count: int) -> list[AssignmentId]:
    layout = await it.begin(run_file(target=count), small_state())
    works = await asyncio.gather(*(device.work(layout) for device in await it.devices(count)))
    return [AssignmentId(work["id"]) for work in works]


def first_chunk(assignment: AssignmentId, key: str = "updates/a/0-0") -> Arrived:
    return Arrived(assignment, None, NEW, Chunk(key, 60), is_last=False)


def next_chunk(assignment: AssignmentId, known: StoredUpload, key: str) -> Arrived:
    return Arrived(assignment, known, known, Chunk(key, 40), is_last=True)


@pytest.mark.usefixtures("any_database")
def test_chunks_of_many_uploads_count_together_and_of_two_for_one_place_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            names, store = await assignments(it, 8), it.state.services.uploads
            begun = await asyncio.gather(*(store.add_chunk(first_chunk(name)) for name in names))
            assert begun == [replace(NEW, offset=60, chunks=(Chunk("updates/a/0-0", 60),))] * 8
            ends = [next_chunk(name, begun[0], f"updates/a/{i}") for i, name in enumerate([*names, names[0]])]
            *whole, second = await asyncio.gather(*(store.add_chunk(end) for end in ends), return_exceptions=True)
            assert isinstance(second, UploadMoved)
            assert second.upload == whole[0] == ends[0].after
            found = [await store.look(name) for name in names]
            assert found == whole == [end.after for end in ends[:-1]]
            again = Arrived(names[0], found[0], NEW, Chunk("updates/a/again", 60), is_last=False)
            assert await store.add_chunk(again) == await store.look(names[0]) == again.after
            assert [chunk.key for chunk in again.dropped] == ["updates/a/0-0", "updates/a/0"]

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database")
def test_a_chunk_that_counts_though_nobody_was_told_counts_once_when_it_is_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [name], store = await assignments(it, 1), it.state.services.uploads
            first = await store.add_chunk(first_chunk(name))
            assert await store.add_chunk(first_chunk(name)) == first
            with pytest.raises(UploadMoved):
                await store.add_chunk(first_chunk(name, "updates/a/another"))
            with pytest.raises(UploadOver):
                await store.add_chunk(first_chunk(AssignmentId("demo.9.1.d0")))

    asyncio.run(scenario())


def test_an_update_that_counted_is_neither_changed_nor_dropped_by_a_replica_that_lags(tmp_path: Path) -> None:
    """It has not heard yet that the report is in; the database has."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout, store = await it.begin(run_file(target=2), small_state()), it.state.services.uploads
            both = await it.devices(2)  # the cohort is drawn once there are two; the round stays open for the second
            device, work = both[0], (await asyncio.gather(*(one.work(layout) for one in both)))[0]
            name = AssignmentId(work["id"])
            update = update_of(layout, torch.ones(layout.n_values))
            assert (await device.upload(name, update)).status_code == 201
            before = await store.look(name)
            assert before is not None
            assert (await device.report(name, update)).json()["outcome"] == "accepted"
            anew = replace(NEW, sha256="1" * 64)
            with pytest.raises(UploadOver):
                await store.add_chunk(Arrived(name, before, anew, Chunk("updates/a/other", 60), is_last=False))
            with pytest.raises(UploadOver):
                await store.drop(name, before)
            assert await store.look(name) == before

    asyncio.run(scenario())


def test_an_update_that_no_report_stands_on_may_be_begun_anew_or_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [name], store = await assignments(it, 1), it.state.services.uploads
            begun = await store.add_chunk(first_chunk(name))
            with pytest.raises(UploadMoved):
                await store.drop(name, replace(begun, offset=59))
            assert await store.drop(name, begun) == begun.chunks
            assert await store.look(name) is None

    asyncio.run(scenario())


def test_an_assignment_that_another_replica_has_locked_holds_up_no_other(tmp_path: Path, postgresql: Cluster) -> None:
    url = postgresql.new_database()

    async def scenario() -> None:
        async with house(tmp_path, database_url=url) as it:
            names = await assignments(it, 3)
            elsewhere = Database(url)
            store = UploadStore(elsewhere)
            async with elsewhere.writing("a report") as tx:
                await tx.execute(text("SELECT id FROM assignments WHERE id = :id FOR UPDATE"), {"id": names[1]})
                adding = [asyncio.create_task(store.add_chunk(first_chunk(name))) for name in names]
                await asyncio.wait([adding[0], adding[2]], timeout=LIMIT_S)
                assert [task.done() for task in adding] == [True, False, True]
                assert await it.state.services.uploads.look(names[1]) is None
            assert all(found.offset == 60 for found in await asyncio.gather(*adding))
            await elsewhere.close()

    asyncio.run(scenario())
