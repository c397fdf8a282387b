"""A large model through the coordinator: memory that does not follow its size, nor the number of those who fetch it."""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tests.federations.server_device import Device, House, Json, repr_digest, run_file, update_of
from tests.server.serve.test_process import serving
from tests.servers.s3_server import bucket_fields, s3_server
from tests.servers.waits import wait_until
from umbel.aggregation.model.artifact import metadata_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import ServerStep
from umbel.client.state.model_files import apply_changes
from umbel.server.blobs.blobs import model_key
from umbel.server.blobs.choose import open_blobs
from umbel.server.blobs.files import file_sha256
from umbel.server.blobs.local import LocalBlobs
from umbel.server.settings import Settings
from umbel.server.sums.model_files import ParentFiles, SummedRound, keep_model, next_model

MIB = 1 << 20
MODEL_MIB = 256
N_CLIENTS = 8


class Memory:
    """A process's resident memory in MiB: what it has at first, and its peak since."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        self._settle()
        (self._process / "clear_refs").write_text("5")  # the peak starts anew
        self._before = self._mib("VmRSS")

    def _settle(self) -> None:
        """A coordinator loads torch once it listens: that is none of a model's memory."""
        wait_until("torch in its memory", lambda: "libtorch" in (self._process / "maps").read_text())
        before = 0.0
        while (now := self._mib("VmRSS")) != before:
            before = now
            time.sleep(1.0)

    def growth_mib(self) -> float:
        return self._mib("VmHWM") - self._before

    def _mib(self, name: str) -> float:
        lines = (self._process / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


class Anonymous:
    """This process's anonymous memory in MiB while it is watched: pages of mapped files are taken back when needed."""

    def __init__(self) -> None:
        self._before = self._peak = self._mib()
        self._is_over = threading.Event()

    @contextmanager
    def watched(self) -> Generator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def growth_mib(self) -> float:
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self._peak = max(self._peak, self._mib())

    def _mib(self) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def large_model(path: Path, mib: int) -> Layout:
    """Write a model of one tensor of so many MiB."""
    state = {"weight": torch.rand(mib, MIB // 4)}
    layout = Layout.of_state(state)
    save_file(state, path, metadata_of(layout))
    return layout


async def put_model(it: House, path: Path) -> str:
    async def pieces() -> AsyncIterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(MIB):
                yield piece

    sha256, size = await asyncio.to_thread(lambda: (file_sha256(path), path.stat().st_size))
    headers = {**it.admin, "Content-Length": str(size)}
    answer = await it.http.put(f"/v1/admin/models/{sha256}", content=pieces(), headers=headers)
    assert answer.status_code == 200, answer.text
    return sha256


async def fetch(device: Device, sha256: str) -> str:
    """The hash of what came."""
    url, digest = f"/v1/models/{sha256}", hashlib.sha256()
    async with device.http.stream("GET", url, headers=device.headers("GET", url, b"")) as response:
        async for piece in response.aiter_raw():
            digest.update(piece)
    return digest.hexdigest()


@pytest.mark.nightly
def test_a_large_model_comes_and_goes_in_a_few_megabytes(tmp_path: Path) -> None:
    layout = large_model(tmp_path / "model", MODEL_MIB)

    async def scenario(pid: int, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
            it = House(http, Settings(data=tmp_path / "data"), None)
            devices = await it.devices(N_CLIENTS)
            coming = Memory(pid)
            sha256 = await put_model(it, tmp_path / "model")
            assert coming.growth_mib() < 32
            assert (await it.put_run(run_file(target=N_CLIENTS), sha256)).status_code == 201
            await asyncio.gather(*(device.work(layout) for device in devices))
            going = Memory(pid)
            assert set(await asyncio.gather(*(fetch(device, sha256) for device in devices))) == {sha256}
            assert going.growth_mib() < 32

    with serving(tmp_path / "data", tmp_path / "log") as (process, url):
        asyncio.run(scenario(process.pid, url))


@pytest.mark.nightly
def test_a_round_of_a_large_model_takes_four_times_the_model_at_most(tmp_path: Path) -> None:
    mib, n_clients = 64, 3
    layout = large_model(tmp_path / "model", mib)
    update = update_of(layout, torch.full((layout.n_values,), 0.5))

    async def send(device: Device, assignment: Json) -> None:
        for start in range(0, len(update), 8 * MIB):
            chunk, is_last = update[start : start + 8 * MIB], start + 8 * MIB >= len(update)
            if start:
                answer = await device.patch(assignment["id"], chunk, start, is_last)
            else:
                fields = {"Upload-Length": str(len(update)), "Upload-Complete": "?0"}
                url = f"/v1/assignments/{assignment['id']}/update"
                answer = await device.send("POST", url, chunk, {**fields, "Repr-Digest": repr_digest(update)})
            assert answer.is_success, answer.text
        assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"

    async def scenario(pid: int, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
            it = House(http, Settings(data=tmp_path / "data"), None)
            sha256 = await put_model(it, tmp_path / "model")
            memory = Memory(pid)
            assert (await it.put_run(run_file(target=n_clients), sha256)).status_code == 201
            devices = await it.devices(n_clients)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            await asyncio.gather(*map(send, devices, assignments))
            [record] = await it.ended(1)
            assert record["committed"]
            assert memory.growth_mib() < 4 * mib

    with serving(tmp_path / "data", tmp_path / "log") as (process, url):
        asyncio.run(scenario(process.pid, url))


class Noise:
    """A round whose mean is noise."""

    def mean_slice(self, start: int, stop: int) -> torch.Tensor:
        return torch.randn(stop - start, generator=torch.Generator().manual_seed(start), dtype=torch.float64)


@pytest.mark.nightly
def test_a_change_of_a_large_model_is_made_and_applied_in_a_few_megabytes(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    blobs.prepare()
    with blobs.scratch() as path:
        layout = large_model(path, MODEL_MIB)
        first = keep_model(blobs, path).sha256
    memory = Memory(os.getpid())
    made = next_model(blobs, layout, ParentFiles(first, first), SummedRound("", Noise()), ServerStep(), 1.0)
    assert memory.growth_mib() < 48
    assert made.change is not None
    paths = [tmp_path / "blobs" / "models" / name for name in (first, made.change.sha256)]
    applying = Anonymous()
    with applying.watched():
        apply_changes(layout, paths[0], [paths[1]], tmp_path / "model")
    assert applying.growth_mib() < 32, "an eighth of the model: about 20, less what this process has free already"
    assert file_sha256(tmp_path / "model") == made.published.sha256


@pytest.mark.nightly
def test_a_large_model_goes_to_a_bucket_and_comes_back_in_pieces(tmp_path: Path) -> None:
    large_model(tmp_path / "model", MODEL_MIB)
    sha256 = file_sha256(tmp_path / "model")
    with s3_server() as server:
        blobs = open_blobs(Settings(data=tmp_path / "data", **bucket_fields(server)))
        blobs.prepare()
        memory = Memory(os.getpid())
        with blobs.scratch() as path:
            (tmp_path / "model").rename(path)
            blobs.put(path, model_key(sha256))
        (tmp_path / "data" / "cache" / sha256).unlink()
        with blobs.local(model_key(sha256)) as path:
            assert file_sha256(path) == sha256
        assert memory.growth_mib() < 96  # four parts on their way, and what the allocators keep
