"""The operator's side: the key, clients, models, runs."""

import asyncio
import stat
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import Device, house, problem, run_file, sha256, small_state
from umbel.aggregation.model.artifact import encode_model

pytestmark = pytest.mark.usefixtures("any_database")


def test_the_admin_key_is_made_once_for_its_owner_and_never_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")

    async def scenario() -> str:
        async with house(tmp_path) as it:
            await it.tokens(1)
            return it.settings.admin_key_path.read_text().strip()

    key = asyncio.run(scenario())
    assert asyncio.run(scenario()) == key
    assert len(key) >= 40
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
    printed = "".join(capfd.readouterr())
    assert key not in caplog.text + printed


def test_a_revoked_client_is_refused_and_its_name_stays_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            [device] = await it.devices(1)
            assert (await device.check_in(layout, wait_s=0.0)).status_code == 200
            gone = await it.http.delete("/v1/admin/clients/d0", headers=it.admin)
            assert gone.status_code == 204
            assert problem(await device.check_in(layout, wait_s=0.0)) == "client-removed"
            [token] = await it.tokens(1)
            assert problem(await device.enrol(token)) == "client-removed"
            assert problem(await Device(it.http, "d0").enrol(token)) == "name-taken"
            [view] = (await it.http.get("/v1/admin/clients", headers=it.admin)).json()
            assert view["id"] == "d0"
            assert view["revoked_at"] is not None
            assert problem(await it.http.delete("/v1/admin/clients/d9", headers=it.admin)) == "not-found"

    asyncio.run(scenario())


def test_the_same_enrolment_again_is_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [token] = await it.tokens(1)
            device = Device(it.http, "ward-7")
            for _ in range(2):
                answer = await device.enrol(token, {"tier": "hospital"})
                assert answer.json()["client"] == "ward-7"
            [view] = (await it.http.get("/v1/admin/clients", headers=it.admin)).json()
            assert view["labels"] == {"tier": "hospital"}

    asyncio.run(scenario())


def test_a_model_with_a_nan_or_under_a_wrong_hash_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            bad = encode_model({"w": torch.tensor([1.0, float("nan")])})
            url = f"/v1/admin/models/{sha256(bad)}"
            assert problem(await it.http.put(url, content=bad, headers=it.admin)) == "malformed-request"
            good = encode_model({"w": torch.tensor([1.0])})
            assert problem(await it.http.put(url, content=good, headers=it.admin)) == "wrong-digest"
            assert [path.name for path in (tmp_path / "blobs").iterdir()] == ["making"]
            assert list((tmp_path / "blobs" / "making").iterdir()) == []

    asyncio.run(scenario())


def test_a_model_over_the_cap_is_refused_by_its_length(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, model_bytes_max=1024) as it:
            url = f"/v1/admin/models/{'0' * 64}"
            assert problem(await it.http.put(url, content=bytes(1025), headers=it.admin)) == "body-too-large"

    asyncio.run(scenario())


def test_the_same_run_again_is_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            model = await it.put_model(small_state())
            first = await it.put_run(run_file(), model)
            again = await it.put_run(run_file(), model)
            assert (first.status_code, again.status_code) == (201, 200)
            assert first.json() == again.json()
            [listed] = (await it.http.get("/v1/admin/runs", headers=it.admin)).json()
            assert listed == first.json() == (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()
            assert problem(await it.put_run(run_file(), model, name="other")) == "malformed-request"
            unknown = await it.http.get("/v1/admin/runs/other/progress", headers=it.admin)
            assert problem(unknown) == "unknown-run"

    asyncio.run(scenario())


def test_a_wrong_layout_is_told_in_words_where_the_layout_is_known(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(), small_state())
            [device] = await it.devices(1)
            other = {**small_state(), "norm.running_mean": torch.zeros(5)}
            await it.put_model(other)
            answer = await device.check_in(layout, layout_digest=type(layout).of_state(other).digest)
            assert problem(answer) == "wrong-layout"
            assert "'norm.running_mean' is float32[5], not float32[4]" in answer.json()["detail"]

    asyncio.run(scenario())
