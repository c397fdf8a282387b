"""Whole rounds over a bucket: the same model as over a directory; a bucket that is away for a while loses nothing."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.s3_server import S3Server, Wire, bucket_fields, s3_server
from tests.server_device import House, house, run_file, small_state, update_of
from umbel.server import bucket


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


def test_a_bucket_that_is_away_at_the_end_of_a_round_delays_it_and_loses_nothing(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "RETRY_S", 0.5)
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
            while "trouble" not in ((await it.progress(wait_s=1.0))["live"] or {"why": "trouble"})["why"]:
                pass
            wire.come_back()
            [record] = await it.ended(1)
            assert record["committed"]
            return str(record["model_sha256"])

    asyncio.run(scenario())
    wire.close()
