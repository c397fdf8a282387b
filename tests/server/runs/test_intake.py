"""Who may have a chunk on its way in, and what all of them take of the disk, whatever clients do."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch

from tests.federations.server_device import Device, House, repr_digest, run_file, update_of
from tests.server.http.test_half_open import half_open
from tests.server.serve.test_process import serving
from tests.servers.files_now import files_in
from tests.servers.waits import until
from tests.suite.nights import at_night
from umbel.aggregation.model.layout import Layout
from umbel.server.problems import Refused
from umbel.server.runs import uploads
from umbel.server.runs.uploads import EACH_MAX, Intake
from umbel.server.settings import Settings

KIB = 1 << 10
STATE = {"weight": torch.zeros(1000, 256)}
UPDATE_BYTES = 1024_064
CHUNK_BYTES_MAX = 1 << 20
INCOMING_BYTES_MAX = 3 * CHUNK_BYTES_MAX
SLACK_BYTES = 512 * KIB
"""Directories, and what the database grows by meanwhile."""


async def held(place: Intake, owner: str, n_bytes: int, log: list[str]) -> None:
    """A chunk whose body never ends."""
    try:
        with place.place(owner, n_bytes) as arrival:
            log.append(f"{owner} came")
            async with arrival.receiving():
                await asyncio.sleep(60)
    except Refused as refused:
        log.append(f"{owner} {refused.kind}")


async def come(place: Intake, owners: str, n_bytes: int, log: list[str]) -> list[asyncio.Task[None]]:
    """One after the other."""
    tasks: list[asyncio.Task[None]] = []
    for owner in owners:
        tasks.append(asyncio.create_task(held(place, owner, n_bytes, log)))
        await asyncio.sleep(0.01)  # what follows from it needs no time, but some turns of the loop
    return tasks


def events(owners: str, n_bytes: int, bytes_max: int) -> list[str]:
    """What happens to chunks of so many bytes that come one after the other and never end."""
    log: list[str] = []

    async def scenario() -> None:
        tasks = await come(Intake(bytes_max), owners, n_bytes, log)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    return log


def test_of_one_owner_the_newest_two_stay() -> None:
    assert events("aaba", 1, 100) == ["a came", "a came", "b came", "a came", "a too-many-chunks"]


def test_a_newcomer_is_refused_while_all_room_is_taken_by_who_came_a_moment_ago() -> None:
    assert events("abcd", 40, 100) == ["a came", "b came", "c too-many-chunks", "d too-many-chunks"]


def test_who_has_had_its_time_goes_for_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PATIENCE_S", 0.0)
    assert events("abc", 40, 100) == ["a came", "b came", "c came", "a too-many-chunks"]


def test_who_renews_its_chunks_has_no_more_time_than_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PATIENCE_S", 0.2)
    log = events(50 * "a" + "b", 40, 100)
    assert "b came" in log
    assert "b too-many-chunks" not in log


def test_a_chunk_that_is_whole_is_not_let_go() -> None:
    place = Intake(100)
    with ExitStack() as whole:
        for _ in range(EACH_MAX):
            whole.enter_context(place.place("a", 1))
        with pytest.raises(Refused, match="still being checked"), place.place("a", 1):
            pass
    with place.place("a", 100):  # all room is free again
        pass


async def assigned(it: House, count: int) -> list[tuple[Device, str]]:
    """Devices and the assignments that they have in one round."""
    layout = await it.begin(run_file(target=count), STATE)
    devices = await it.devices(count)
    works = await asyncio.gather(*(device.work(layout) for device in devices))
    return [(device, work["id"]) for device, work in zip(devices, works, strict=True)]


def without_end(device: Device, assignment: str) -> bytes:
    """A signed upload in one chunk, without its last byte."""
    path, update = f"/v1/assignments/{assignment}/update", bytes(UPDATE_BYTES)
    fields = device.headers("POST", path, update) | {
        "Host": "x",
        "Content-Length": str(len(update)),
        "Upload-Length": str(len(update)),
        "Upload-Complete": "?1",
        "Repr-Digest": repr_digest(update),
    }
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items())
    return head.encode() + b"\r\n" + update[:-1]


async def settled_bytes(data: Path) -> int:
    """What lies in a directory, once that does not change any more."""
    seen = [-1, -2, -3]
    while len(set(seen[-3:])) > 1:
        await asyncio.sleep(0.2)
        seen.append(bytes_in(data))
    return seen[-1]


def bytes_in(directory: Path) -> int:
    """Of all its files."""
    return sum(state.st_size for _, state in files_in(directory))


@pytest.mark.slow
@pytest.mark.parametrize("n_clients", [*at_night(1), 20], ids=["of one client", "of many clients"])
def test_chunks_that_never_end_take_a_bounded_part_of_the_disk(
    n_clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_CHUNK_BYTES_MAX", str(CHUNK_BYTES_MAX))
    monkeypatch.setenv("UMBEL_INCOMING_BYTES_MAX", str(INCOMING_BYTES_MAX))

    async def scenario(url: str) -> None:
        making = tmp_path / "data" / "blobs" / "making"
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            it = House(http, Settings(data=tmp_path / "data"), None)
            wicked = await assigned(it, n_clients)
            before = await settled_bytes(tmp_path / "data")
            lines = [
                await half_open(httpx.URL(url).port or 0, without_end(device, assignment))
                for device, assignment in wicked * (40 // n_clients)
            ]
            bound = min(n_clients * EACH_MAX * CHUNK_BYTES_MAX, INCOMING_BYTES_MAX)
            await until("more than a whole update", lambda: bytes_in(tmp_path / "data") - before > UPDATE_BYTES)
            taken = await settled_bytes(tmp_path / "data") - before
            print(f"{len(lines)} bodies of {UPDATE_BYTES} bytes take {taken}, at most {bound}")
            assert UPDATE_BYTES < taken < bound + SLACK_BYTES
            for line in lines:
                line.transport.abort()
            await until("an empty folder: what they have written goes with them", lambda: not any(making.iterdir()))
            device, assignment = wicked[0]
            update = update_of(Layout.of_state(STATE), torch.ones(256_000))
            assert (await device.upload(assignment, update)).status_code == 201

    with serving(tmp_path / "data", tmp_path / "log") as (_, url):
        asyncio.run(scenario(url))
