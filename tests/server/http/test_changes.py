"""Runs whose clients download changes: who has a version that is not too old makes the newest of it, byte for byte."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.federations.audit_house import operating
from tests.federations.lifecycle_house import obeyed
from tests.federations.server_device import (
    Device,
    House,
    Json,
    house,
    problem,
    run_file,
    sha256,
    small_state,
    update_for,
)
from umbel.aggregation.downlink.change import apply_change
from umbel.aggregation.model.artifact import tensor_offsets
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.types import CHANGES_MAX
from umbel.client.cli.audit import replay_run
from umbel.client.operator.operator import Operator
from umbel.server.serve.app import sweep_blobs
from umbel.server.sums.model_removal import sweep_models

pytestmark = pytest.mark.usefixtures("any_database_in_time")
STATE = {**small_state(), "weight": torch.randn(2000, generator=torch.Generator().manual_seed(9))}
LAYOUT = Layout.of_state(STATE)
CHANGE = '[downlink]\nname = "change"\n[retention]\nupdates = "all"\n'
N_DEVICES = 2


def a_run(count: int) -> str:
    return run_file(count=count, target=N_DEVICES, minimum=N_DEVICES)


class Bytes:
    """A model file's values, in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self._offsets = tensor_offsets(data[8 : 8 + int.from_bytes(data[:8], "little")])

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> torch.Tensor:
        start = self._offsets[name] + first * dtype.itemsize
        return torch.frombuffer(self.data, dtype=dtype, count=n_values, offset=start).clone()

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        start = self._offsets[name] + first * values.dtype.itemsize
        self.data[start : start + values.nbytes] = values.view(torch.uint8).numpy().tobytes()


async def asked(devices: list[Device]) -> Json:
    """What the first of all devices is asked."""
    assignments = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
    return assignments[0]


async def fetched(device: Device, digest: str) -> bytes:
    answer = await device.send("GET", f"/v1/models/{digest}")
    assert answer.status_code == 200, answer.text
    assert sha256(answer.content) == digest
    return answer.content


async def followed(device: Device, assignment: Json, model: bytes) -> bytes:
    """The assignment's model, made of `model` and changes alone."""
    values, have = Bytes(model), sha256(model)
    for change in assignment["changes"]:
        if change["from_sha256"] == have:
            data = await fetched(device, change["sha256"])
            assert len(data) == change["size_bytes"]
            apply_change(LAYOUT, [data], len(data), values)
            have = sha256(bytes(values.data))
    assert have == assignment["model"]["sha256"]
    return bytes(values.data)


def values_of(seed: int) -> torch.Tensor:
    return 0.01 * torch.randn(LAYOUT.n_values, generator=torch.Generator().manual_seed(seed))


async def rounds(it: House, devices: list[Device], numbers: range) -> list[Json]:
    """Some rounds by all devices, who download nothing; their records."""
    for number in numbers:
        await asyncio.gather(*(_work(one, 10 * number + i) for i, one in enumerate(devices)))
        await it.ended(number)
    return await it.ended(numbers.stop - 1)


async def _work(device: Device, seed: int) -> None:
    assignment = await device.work(LAYOUT)
    update = update_for(assignment, LAYOUT, values_of(seed))
    assert (await device.upload(assignment["id"], update)).status_code == 201
    assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"


@pytest.mark.slow
def test_who_has_any_of_the_last_versions_makes_the_newest_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(a_run(CHANGES_MAX + 4) + CHANGE, STATE)
            devices = await it.devices(N_DEVICES)
            models = [await fetched(devices[0], (await asked(devices))["model"]["sha256"])]
            for number in range(1, CHANGES_MAX + 3):
                await rounds(it, devices, range(number, number + 1))
                assignment = await asked(devices)
                assert len(assignment["changes"]) == min(number, CHANGES_MAX)
                assert sum(one["size_bytes"] for one in assignment["changes"]) < assignment["model"]["size_bytes"]
                oldest = models[-len(assignment["changes"])]
                newest = await followed(devices[0], assignment, oldest)
                assert newest == await followed(devices[0], assignment, models[-1])
                assert newest == await fetched(devices[0], assignment["model"]["sha256"])
                assert max(one["size_bytes"] for one in assignment["changes"]) < len(models[0]) / 6
                models.append(newest)

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_is_published_stays_close_to_a_master_copy_that_is_as_without_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        masters = list[bytes]()
        for name, more in (("plain", ""), ("changed", CHANGE)):
            async with house(tmp_path / name) as it:
                await it.begin(a_run(5) + more, STATE)
                await rounds(it, await it.devices(N_DEVICES), range(1, 6))
                newest = (await it.http.get("/v1/admin/runs/demo/versions?after=4", headers=it.admin)).json()[0]
                out = tmp_path / f"{name}.safetensors"

                def export(operator: Operator, path: Path = out) -> None:
                    operator.download_master("demo", operator.versions("demo")[-1], path)

                await operating(it, export)
                masters.append(out.read_bytes())
                assert sha256(masters[-1]) == newest["master_sha256"]
                public = await it.model(newest["sha256"])
        assert masters[0] == masters[1]
        master = load(masters[1])
        off = (master["weight"] - public["weight"]).square().mean().sqrt()
        assert 0 < off < 0.004, "a round's change has a root mean square of 0.007"
        assert torch.equal(master["norm.num_batches_tracked"], public["norm.num_batches_tracked"])

    asyncio.run(scenario())


def test_a_round_made_again_has_the_same_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(a_run(3) + CHANGE + '[codec]\nname = "integer"\n', STATE)
            await rounds(it, await it.devices(N_DEVICES), range(1, 4))
            await operating(it, lambda operator: replay_run(operator, "demo", all_=True))

    asyncio.run(scenario())
    assert capsys.readouterr().out.count("the same hash") == 3


@pytest.mark.slow
def test_a_rollback_begins_a_new_chain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(a_run(6) + CHANGE, STATE)
            devices = await it.devices(N_DEVICES)
            await rounds(it, devices, range(1, 4))
            before = await asked(devices)
            back = await obeyed(it, "rollback", to=1)
            assignment = await asked(devices)
            assert assignment["model"]["sha256"] == back["model"]["sha256"] != before["model"]["sha256"]
            assert (len(before["changes"]), len(assignment["changes"])) == (3, 0)
            base = await fetched(devices[0], assignment["model"]["sha256"])
            await asyncio.gather(*(_work(one, i) for i, one in enumerate(devices)))
            await it.ended(5)
            assignment = await asked(devices)
            assert len(assignment["changes"]) == 1
            await followed(devices[0], assignment, base)

    asyncio.run(scenario())


def test_a_restart_leaves_the_chain_and_its_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(a_run(4) + CHANGE, STATE)
            devices = await it.devices(N_DEVICES)
            first = await fetched(devices[0], (await asked(devices))["model"]["sha256"])
            await rounds(it, devices, range(1, 3))
            before = await asked(devices)
        async with house(tmp_path) as it:
            await sweep_blobs(it.state.services)
            await sweep_models(it.state.services, kept_s=0.0)
            again = [Device(it.http, one.name, key=one.key) for one in devices]
            after = await asked(again)
            assert after["changes"] == before["changes"]
            await followed(again[0], after, first)

    asyncio.run(scenario())


def test_a_change_goes_with_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            keep = CHANGE.replace("[retention]\n", "[retention]\nversions = 2\n")
            await it.begin(a_run(6) + keep, STATE)
            devices = await it.devices(N_DEVICES)
            await rounds(it, devices, range(1, 3))
            old = (await asked(devices))["changes"]
            await rounds(it, devices, range(3, 5))
            assignment = await asked(devices)
            assert len(assignment["changes"]) == 2
            await sweep_models(it.state.services, kept_s=0.0)
            gone = await devices[0].send("GET", f"/v1/models/{old[0]['sha256']}")
            assert problem(gone) == "unknown-model"
            kept = {path.name for path in (it.settings.data / "blobs" / "models").iterdir()}
            assert len(kept) == 1 + 1 + 3 * 2, "version 0, its master copy, and three files of each that is kept"
            assert {one["sha256"] for one in assignment["changes"]} <= kept
            await sweep_models(it.state.services, kept_s=0.0)
            assert kept == {path.name for path in (it.settings.data / "blobs" / "models").iterdir()}

    asyncio.run(scenario())


def test_what_goes_down_is_counted_as_it_was_on_the_wire(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(a_run(3) + CHANGE, STATE)
            devices = await it.devices(N_DEVICES)
            first = (await asked(devices))["model"]["sha256"]
            models = [await fetched(one, first) for one in devices]
            await rounds(it, devices, range(1, 2))
            [change] = (await asked(devices))["changes"]
            for device, model in zip(devices, models, strict=True):
                await followed(device, await device.work(LAYOUT), model)
            records = await rounds(it, devices, range(2, 3))
            assert [one["bytes_down"] for one in records] == [2 * len(models[0]), 2 * change["size_bytes"]]
            head = await devices[0].send("HEAD", f"/v1/models/{change['sha256']}")
            assert head.headers["content-type"] == "application/octet-stream"
            ranged = await devices[0].send(
                "GET",
                f"/v1/models/{change['sha256']}",
                headers={"Range": "bytes=64-71", "If-Range": head.headers["etag"]},
            )
            assert (ranged.status_code, len(ranged.content)) == (206, 8)

    asyncio.run(scenario())


def test_whoever_measures_a_model_is_led_to_it_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(run_file(count=2, target=1) + CHANGE + "[evaluation]\nevery = 1\nclients = 1\n", STATE)
            devices = await it.devices(2)
            asked = {asyncio.create_task(one.work(LAYOUT)): one for one in devices}
            done, later = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            [training], [evaluation] = done, later
            trainer, other = asked[training], asked[evaluation]
            base = await fetched(trainer, training.result()["model"]["sha256"])
            await _work(trainer, 1)
            assignment = await evaluation
            assert assignment["task"] == "evaluation"
            await followed(other, assignment, base)

    asyncio.run(scenario())


def test_a_run_cannot_begin_with_a_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(a_run(2) + CHANGE, STATE)
            devices = await it.devices(N_DEVICES)
            await rounds(it, devices, range(1, 2))
            [change] = (await asked(devices))["changes"]
            text = a_run(2).replace('"demo"', '"other"')
            assert problem(await it.put_run(text, change["sha256"], "other")) == "unknown-model"

    asyncio.run(scenario())


def test_a_master_copy_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(a_run(2) + CHANGE, STATE)
            answer = await it.http.get("/v1/admin/runs/demo/versions/7/master", headers=it.admin)
            assert problem(answer) == "unknown-version"
            listed = (await it.http.get("/v1/admin/runs/demo/versions", headers=it.admin)).json()
            assert json.dumps(listed).count("master_sha256") == 1

    asyncio.run(scenario())
