"""A coordinator that goes away in mid-round: another over the same directory goes on to the same model."""

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import Device, Json, house, problem, repr_digest, run_file, small_state, update_of
from tests.servers.waits import until
from umbel.aggregation.model.layout import Layout

N_CLIENTS = 4


def updates_of(layout: Layout) -> list[bytes]:
    generator = torch.Generator().manual_seed(3)
    return [update_of(layout, torch.randn(layout.n_values, generator=generator)) for _ in range(N_CLIENTS)]


async def send(device: Device, assignment: Json, update: bytes) -> None:
    assert (await device.upload(assignment["id"], update)).status_code == 201
    answer = await device.report(assignment["id"], update)
    assert answer.json()["outcome"] == "accepted"


async def one_round(data: Path, order: list[int]) -> str:
    """The model's hash after a round whose reports arrive in this order."""
    async with house(data) as it:
        layout = await it.begin(run_file(target=N_CLIENTS), small_state())
        devices = await it.devices(N_CLIENTS)
        assignments = await asyncio.gather(*(device.work(layout) for device in devices))
        updates = updates_of(layout)
        for i in order:
            await send(devices[i], assignments[i], updates[i])
        [record] = await it.ended(1)
        return str(record["model_sha256"])


@pytest.mark.usefixtures("any_database")
def test_any_order_of_arrival_gives_the_same_model(tmp_path: Path) -> None:
    orders = [random.Random(seed).sample(range(N_CLIENTS), N_CLIENTS) for seed in range(4)]
    hashes = {asyncio.run(one_round(tmp_path / str(i), order)) for i, order in enumerate(orders)}
    assert len(hashes) == 1


@pytest.mark.usefixtures("any_database")
def test_a_restart_in_mid_round_gives_the_same_model(tmp_path: Path) -> None:
    async def scenario() -> str:
        async with house(tmp_path / "b") as it:
            layout = await it.begin(run_file(target=N_CLIENTS), small_state())
            devices = await it.devices(N_CLIENTS)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            updates = updates_of(layout)
            await send(devices[2], assignments[2], updates[2])
            assert (await devices[0].upload(assignments[0]["id"], updates[0])).status_code == 201
            fields = {"Upload-Complete": "?0", "Upload-Length": str(len(updates[1]))}
            fields["Repr-Digest"] = repr_digest(updates[1])
            url = f"/v1/assignments/{assignments[1]['id']}/update"
            assert (await devices[1].send("POST", url, updates[1][:90], fields)).status_code == 201
            old_request = devices[3].headers("GET", f"/v1/assignments/{assignments[3]['id']}", b"")
            await it.http.get(f"/v1/assignments/{assignments[3]['id']}", headers=old_request)
        async with house(tmp_path / "b") as it:
            for device in devices:
                device.http = it.http
            replayed = await it.http.get(f"/v1/assignments/{assignments[3]['id']}", headers=old_request)
            assert problem(replayed) == "replayed-nonce"
            again = await devices[3].work(layout)
            assert 0 < again.pop("window_s") < assignments[3].pop("window_s")
            assert again == assignments[3]
            assert (await devices[0].report(assignments[0]["id"], updates[0])).json()["outcome"] == "accepted"
            rest = await devices[1].patch(assignments[1]["id"], updates[1][90:], 90, is_last=True)
            assert rest.status_code == 204
            assert (await devices[1].report(assignments[1]["id"], updates[1])).json()["outcome"] == "accepted"
            await send(devices[3], assignments[3], updates[3])
            assert (await devices[2].report(assignments[2]["id"], updates[2])).json()["outcome"] == "accepted"
            [record] = await it.ended(1)
            return str(record["model_sha256"])

    assert asyncio.run(scenario()) == asyncio.run(one_round(tmp_path / "a", [0, 1, 2, 3]))


@pytest.mark.usefixtures("any_database")
def test_a_round_that_was_closing_commits_after_a_restart(tmp_path: Path) -> None:
    """The commit fails (here: its files cannot be written) until the coordinator comes back."""

    async def scenario() -> str:
        async with house(tmp_path / "b") as it:
            layout = await it.begin(run_file(target=N_CLIENTS), small_state())
            devices = await it.devices(N_CLIENTS)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            updates = updates_of(layout)
            for i, update in enumerate(updates):
                await devices[i].upload(assignments[i]["id"], update)
            (tmp_path / "b" / "blobs" / "making").rmdir()
            for i, update in enumerate(updates):
                await devices[i].report(assignments[i]["id"], update)
            progress = await it.progress()
            while "cannot continue" not in progress["live"]["why"]:
                progress = await it.progress(wait_s=5.0)
            assert progress["live"]["phase"] == "closing"
        async with house(tmp_path / "b") as it:
            [record] = await it.ended(1)
            assert record["committed"]
            return str(record["model_sha256"])

    assert asyncio.run(scenario()) == asyncio.run(one_round(tmp_path / "a", [3, 1, 0, 2]))


def test_what_a_crash_left_behind_is_swept(tmp_path: Path) -> None:
    asyncio.run(one_round(tmp_path, [0, 1, 2, 3]))
    left = [tmp_path / "blobs" / "updates" / "demo.1.1.d0" / "0-1", tmp_path / "blobs" / "partials" / "1" / "gone"]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left")
    (tmp_path / "blobs" / "making" / "draft").write_bytes(b"left")

    async def scenario() -> None:
        async with house(tmp_path) as it:
            assert (await it.progress())["run"]["status"] == "finished"
            await until("a store without what was left", lambda: not any(path.exists() for path in left))

    asyncio.run(scenario())
    assert list((tmp_path / "blobs" / "making").iterdir()) == []


def test_the_database_syncs_every_commit(tmp_path: Path) -> None:
    asyncio.run(one_round(tmp_path, [0, 1, 2, 3]))
    connection = sqlite3.connect(tmp_path / "umbel.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
