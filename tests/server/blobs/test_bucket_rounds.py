"""Whole rounds over a bucket: the same model as over a directory; a bucket that is away for a while loses nothing."""

import asyncio
import hashlib
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.federations.federation import Federation, check
from tests.federations.server_device import House, house, run_file, small_state, update_of
from tests.servers.killing import Death, start
from tests.servers.ports import own_port
from tests.servers.s3_server import S3Server, Wire, bucket_fields, bucket_settings, s3_server
from tests.servers.waits import LIMIT_S
from umbel.server.blobs import s3
from umbel.server.blobs.blobs import BlobStore, model_key
from umbel.server.blobs.choose import open_blobs
from umbel.server.serve.app import sweep_blobs
from umbel.server.settings import Settings
from umbel.server.sums.model_removal import sweep_models


@pytest.fixture(scope="module")
def server() -> Generator[S3Server]:
    with s3_server() as running:
        yield running


async def take_part(it: House, n_devices: int) -> str:
    """The model's hash after one round."""
    layout = await it.begin(run_file(target=n_devices), small_state())
    devices = await it.devices(n_devices)
    assignments = await asyncio.gather(*(device.work(layout) for device in devices))
    for i, (device, assignment) in enumerate(zip(devices, assignments, strict=True)):
        values = torch.randn(layout.n_values, generator=torch.Generator().manual_seed(i))
        update = update_of(layout, values)
        assert (await device.upload(assignment["id"], update)).status_code == 201
        assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
    [record] = await it.ended(1)
    return str(record["model_sha256"])


async def one_round(data: Path, **settings: Any) -> str:
    async with house(data, **settings) as it:
        return await take_part(it, n_devices=3)


def test_a_round_over_a_bucket_makes_the_same_model_as_over_a_directory(server: S3Server, tmp_path: Path) -> None:
    fields = bucket_fields(server)
    over_bucket = asyncio.run(one_round(tmp_path / "a", **fields))
    assert over_bucket == asyncio.run(one_round(tmp_path / "b"))
    assert not list((tmp_path / "a" / "making").iterdir())


@pytest.mark.slow
def test_a_bucket_that_is_away_at_the_end_of_a_round_delays_it_and_loses_nothing(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "RETRY_S", 0.5)
    wire = Wire(server.url)

    async def scenario() -> str:
        async with house(tmp_path / "a", **bucket_fields(server, s3_endpoint=wire.url)) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            update = update_of(layout, torch.ones(layout.n_values))
            wire.go_down()
            away = await device.upload(assignment["id"], update)
            assert away.status_code == 503
            wire.come_back()
            assert (await device.upload(assignment["id"], update)).status_code == 201
            wire.go_down()
            assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
            while (
                "cannot continue" not in ((await it.progress(wait_s=1.0))["live"] or {"why": "cannot continue"})["why"]
            ):
                pass
            wire.come_back()
            [record] = await it.ended(1)
            assert record["committed"]
            return str(record["model_sha256"])

    asyncio.run(scenario())
    wire.close()


async def fare_despite(settings: Settings, death: Death, blobs: BlobStore) -> set[str]:
    """A run of two rounds whose coordinator dies once, and is started again: the updates in the bucket in between."""
    process = start(settings, death)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=10.0) as http:
            federation = Federation(http, settings)
            running = asyncio.create_task(federation.run())
            await asyncio.to_thread(process.join, LIMIT_S)
            assert process.exitcode == -signal.SIGKILL
            left = set(await asyncio.to_thread(lambda: list(blobs.keys("updates"))))
            process = start(settings)
            check(await asyncio.wait_for(running, LIMIT_S), federation.accepted)
            return left
    finally:
        process.kill()
        process.join()


async def model_keys(settings: Settings) -> set[str]:
    """What the database refers to, when a coordinator has just started over it and has swept."""
    async with house(settings.data, **settings.model_dump(exclude={"data"})) as it:
        for sweep in (sweep_blobs, sweep_models):
            await sweep(it.state.services)
        answer = await it.http.get("/v1/admin/runs/demo/versions", headers=it.admin)
        found = {model_key(one["sha256"]) for one in answer.json()}
        for key in found:
            model = await it.http.get(f"/v1/admin/{key}", headers=it.admin)
            assert model_key(hashlib.sha256(model.content).hexdigest()) == key
        return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "death",
    [Death("store a chunk", is_before=True, nth=3), Death("remove the updates of an attempt", is_before=True, nth=2)],
    ids=["before a chunk counts", "before the updates of a round are removed"],
)
def test_what_a_crash_left_in_a_bucket_goes_and_what_is_referred_to_stays(
    server: S3Server, tmp_path: Path, death: Death
) -> None:
    settings = bucket_settings(server, tmp_path / "data", port=own_port(), download_links=False)
    blobs = open_blobs(settings.model_copy(update={"data": tmp_path / "eyes"}))
    left = asyncio.run(fare_despite(settings, death, blobs))
    assert left, "else this shows nothing"
    referred_to = asyncio.run(model_keys(settings))
    assert len(referred_to) == 3
    assert not list(blobs.keys("updates"))
    assert not list(blobs.keys("partials"))
    assert referred_to <= set(blobs.keys("models"))
