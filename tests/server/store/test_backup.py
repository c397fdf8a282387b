"""docs/how-to/back-up-and-restore.md: its own commands, while a coordinator runs, and a start from the copy."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import torch

from tests.federations.server_device import Device, House, run_file, small_state
from tests.repository import ROOT
from tests.server.serve.test_process import refused_start, serving
from umbel.aggregation.model.layout import Layout
from umbel.server.settings import Settings

PAGE = ROOT / "docs" / "how-to" / "back-up-and-restore.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("sqlite3") is None, reason="SQLite's shell is not installed"),
]


def back_up(data: Path, backup: Path) -> None:
    """What the page says, word for word, but for the two directories."""
    [commands] = re.findall(r"```sh\n(sqlite3 .*?)```", PAGE.read_text(), re.DOTALL)
    backup.mkdir(mode=0o700)
    here = commands.replace("/srv/umbel", str(data)).replace("/backup", str(backup))
    subprocess.run(["sh", "-eu", "-c", here], check=True, timeout=60.0)


async def one_round(it: House) -> list[Device]:
    """The first of two rounds of a run; its devices."""
    layout = await it.begin(run_file(count=2, target=2, minimum=2), small_state())
    devices = await it.devices(2)
    await asyncio.gather(*(device.take_part(layout, torch.ones(layout.n_values)) for device in devices))
    [record] = await it.ended(1)
    assert record["committed"]
    return devices


async def next_round(it: House, devices: list[Device]) -> None:
    """The run goes on from the first round's model, with the clients that were enrolled."""
    at_home = [Device(it.http, one.name, key=one.key) for one in devices]
    layout = Layout.of_state(small_state())
    await asyncio.gather(*(device.take_part(layout, torch.ones(layout.n_values)) for device in at_home))
    records = await it.ended(2)
    assert [record["committed"] for record in records] == [True, True]
    before, after = [(await it.model(record["model_sha256"]))["embed.weight"] for record in records]
    assert torch.allclose(after, before + 1.0, atol=1e-3)


@pytest.mark.nightly
def test_a_copy_that_was_made_of_a_running_coordinator_goes_on_and_one_without_its_blobs_does_not(
    tmp_path: Path,
) -> None:
    data, backup, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"

    async def scenario(url: str, at: Path, devices: list[Device] | None = None) -> list[Device]:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            it = House(http, Settings(data=at), None)
            if devices is None:
                return await one_round(it)
            await next_round(it, devices)
            return devices

    with serving(data, tmp_path / "log") as (_, url):
        devices = asyncio.run(scenario(url, data))
        back_up(data, backup)
        asyncio.run(scenario(url, data, devices))
    shutil.copytree(backup, restored)
    with serving(restored, tmp_path / "restored.log") as (_, url):
        asyncio.run(scenario(url, restored, devices))

    shutil.rmtree(restored / "blobs" / "models")
    with serving(restored, tmp_path / "older.log"):
        pass
    assert "run demo cannot continue" not in (tmp_path / "older.log").read_text(), "it is finished"

    shutil.rmtree(backup / "blobs" / "models")
    with serving(backup, tmp_path / "older.log"):
        pass
    said = f"run demo cannot continue: its newest model is not in {backup / 'blobs'}"
    assert said in (tmp_path / "older.log").read_text()

    shutil.rmtree(backup / "blobs")
    said = refused_start(backup)
    assert "do not belong to this database, which has 1 run" in said
    shutil.copytree(data / "blobs", backup / "blobs", dirs_exist_ok=True)
    (backup / "audit.key").unlink()
    assert "the audit key in" in refused_start(backup)
