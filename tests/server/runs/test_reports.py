"""What makes a report count, whatever came before it: every check, exactly when the machine would accept it."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import house, problem, rows, run_file, small_state, stored_update, update_of

pytestmark = pytest.mark.usefixtures("any_database")


def test_a_client_that_declined_and_then_reports_is_checked_like_any_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            liar, honest = await it.devices(2)
            assignment, other = await asyncio.gather(liar.work(layout), honest.work(layout))
            declined = await liar.send("PUT", f"/v1/assignments/{assignment['id']}/decline", b'{"reason": "bored"}')
            assert declined.status_code == 204
            before = rows(it.settings)
            assert problem(await liar.report(assignment["id"], b"nothing was uploaded")) == "upload-incomplete"
            assert problem(await liar.report(assignment["id"], b"", sample_count=1001)) == "report-refused"
            assert rows(it.settings) == before

            update = update_of(layout, torch.ones(layout.n_values))
            await honest.upload(other["id"], update)
            await honest.report(other["id"], update)
            [record] = await it.ended(1)
            assert (record["committed"], record["reported"]) == (True, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"sample_count": 11}, "report-refused"),  # it checked in with 10, and was drawn by that
        ({"evaluation": {"loss": 1.0}, "evaluation_sample_count": 1001}, "report-refused"),
        ({"metrics": {"loss": 1e31}}, "malformed-request"),
        ({"evaluation": {"loss": -1e31}, "evaluation_sample_count": 1}, "malformed-request"),
    ],
)
def test_counts_and_metrics_beyond_their_bounds_are_refused(
    tmp_path: Path, changed: dict[str, object], kind: str
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            update = update_of(layout, torch.ones(layout.n_values))
            await device.upload(assignment["id"], update)
            before = rows(it.settings)
            assert problem(await device.report(assignment["id"], update, **changed)) == kind
            assert rows(it.settings) == before
            accepted = await device.report(assignment["id"], update, metrics={"loss": 1e30})
            assert accepted.json()["outcome"] == "accepted"
            [record] = await it.ended(1)
            assert record["metrics"] == {"loss": 1e30}

    asyncio.run(scenario())


def test_a_round_whose_accepted_update_is_lost_from_disk_is_abandoned_and_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2, window_s=600), small_state())
            devices = await it.devices(2)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            update = update_of(layout, torch.ones(layout.n_values))
            for device, assignment in zip(devices, assignments, strict=True):
                await device.upload(assignment["id"], update)
            [file] = stored_update(it.settings, assignments[1]["id"])
            file.unlink()  # the disk fails, or somebody tidies up
            for device, assignment in zip(devices, assignments, strict=True):
                await device.report(assignment["id"], update)
            [lost] = await it.ended(1)
            assert not lost["committed"]
            assert "could not be read again" in lost["reason"]
            await asyncio.gather(*(device.take_part(layout, torch.ones(layout.n_values)) for device in devices))
            _, record = await it.ended(2)
            assert (record["committed"], record["attempt"]) == (True, 2)

    asyncio.run(scenario())


def test_a_step_out_of_the_models_range_makes_no_model_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            text = run_file(target=1).replace("[aggregation]", "[aggregation]\nserver_learning_rate = 1e38")
            layout = await it.begin(text, {"weight": torch.full((4,), 3e38)})
            [device] = await it.devices(1)
            await device.take_part(layout, torch.full((layout.n_values,), 8.0))
            [record] = await it.ended(1)
            assert not record["committed"]
            assert record["reason"].startswith("no model can be made of the sum")
            assert (await it.progress())["run"]["model"]["version"] == 0

    asyncio.run(scenario())
