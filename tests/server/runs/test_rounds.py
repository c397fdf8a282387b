"""How rounds end: an exact mean, over-selection, silence, refusals, stops; and which clients are woken when."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import (
    Device,
    Json,
    LateClock,
    UntimedClock,
    house,
    pass_time,
    problem,
    rows,
    run_file,
    small_state,
    update_of,
)
from tests.federations.whole_states import next_master, published_state
from tests.servers.waits import LIMIT_S, until, until_told
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import master_of
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.update.grid import GridAccumulator

pytestmark = pytest.mark.usefixtures("any_database_in_time")


def update(layout: Layout) -> bytes:
    return update_of(layout, torch.full((layout.n_values,), 0.5))


async def finish(device: Device, layout: Layout, assignment: Json) -> Json:
    assert (await device.upload(assignment["id"], update(layout))).status_code == 201
    return dict((await device.report(assignment["id"], update(layout), steps_done=2)).json())


def fates(record: Json) -> dict[str, str]:
    return {client["client"]: client["fate"] for client in record["clients"]}


def test_the_surplus_client_is_released_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, UntimedClock()) as it:
            layout = await it.begin(run_file(target=2, over_selection=1.5), small_state())
            devices = await it.devices(3)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            assert (await devices[2].upload(assignments[2]["id"], update(layout))).status_code == 201
            url = f"/v1/assignments/{assignments[2]['id']}"
            held = asyncio.create_task(devices[2].send("GET", f"{url}?wait_s=20"))
            bells = (await it.driver()).bells
            await until("a request that is held open", lambda: bells.is_heard(devices[2].name))
            for device, assignment in zip(devices[:2], assignments[:2], strict=True):
                assert (await finish(device, layout, assignment))["outcome"] == "accepted"
            status = (await asyncio.wait_for(held, LIMIT_S)).json()
            assert status["state"] == "closed"
            assert "target of 2" in status["reason"]
            answer = await devices[2].report(assignments[2]["id"], update(layout))
            assert answer.json()["outcome"] == "surplus"
            [record] = await it.ended(1)
            assert fates(record) == {"d0": "partial", "d1": "partial", "d2": "released"}
            assert (record["selected"], record["reported"], record["partial"], record["dropped"]) == (3, 2, 2, 1)
            assert all(client["bytes_up"] == len(update(layout)) for client in record["clients"])

    asyncio.run(scenario())


def test_a_window_that_ends_too_empty_is_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            layout = await it.begin(run_file(target=2, minimum=2, window_s=60.0), small_state())
            devices = await it.devices(2)
            first = await asyncio.gather(*(device.work(layout) for device in devices))
            assert (await finish(devices[0], layout, first[0]))["outcome"] == "accepted"
            await pass_time(it, clock, 61.0)
            [record] = await it.ended(1)
            assert not record["committed"]
            assert record["model_sha256"] is None
            assert (await devices[1].report(first[1]["id"], update(layout))).json()["outcome"] == "abandoned"
            second = await asyncio.gather(*(device.work(layout) for device in devices))
            assert [one["attempt"] for one in second] == [2, 2]
            assert [one["seed"] for one in second] == [one["seed"] for one in first]
            for device, assignment in zip(devices, second, strict=True):
                assert (await finish(device, layout, assignment))["outcome"] == "accepted"
            ended = await it.ended(2)
            assert ended[1]["committed"]
            assert (await it.progress())["run"]["status"] == "finished"
            assert (await devices[0].check_in(layout)).json()["run_status"] == "finished"

    asyncio.run(scenario())


def test_a_client_that_declines_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            devices = await it.devices(2)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            url = f"/v1/assignments/{assignments[1]['id']}/decline"
            for _ in range(2):
                declined = await devices[1].send("PUT", url, b'{"reason": "on battery"}')
                assert declined.status_code == 204
            await finish(devices[0], layout, assignments[0])
            [record] = await it.ended(1)
            assert record["committed"]
            assert fates(record)["d1"] == "declined"
            assert record["clients"][1]["reason"] == "on battery"

    asyncio.run(scenario())


def test_the_last_report_may_end_an_attempt_that_is_short_of_reports(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            devices = await it.devices(2)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            url = f"/v1/assignments/{assignments[1]['id']}/decline"
            await devices[1].send("PUT", url, b'{"reason": "on battery"}')
            answer = await finish(devices[0], layout, assignments[0])
            assert (await devices[0].report(assignments[0]["id"], update(layout))).json() == answer
            [record] = await it.ended(1)
            assert not record["committed"]
            assert (await it.progress())["live"]["attempt"] == 2
            again = await asyncio.gather(*(device.work(layout) for device in devices))
            for device, assignment in zip(devices, again, strict=True):
                await finish(device, layout, assignment)
            assert (await it.ended(2))[1]["committed"]

    asyncio.run(scenario())


def test_a_stop_sends_waiting_clients_home_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, UntimedClock()) as it:
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            [device] = await it.devices(1)
            held = asyncio.create_task(device.check_in(layout, wait_s=20.0))
            await until_told("a client that waits", (await it.driver()).waiting.candidates)
            await it.http.post("/v1/admin/runs/demo/stop", json={"reason": "enough"}, headers=it.admin)
            answer = (await asyncio.wait_for(held, LIMIT_S)).json()
            assert (answer["run_status"], answer["reason"]) == ("stopped", "enough")
            before = rows(it.settings)
            await it.http.post("/v1/admin/runs/demo/stop", json={"reason": "again"}, headers=it.admin)
            assert rows(it.settings) == before
        async with house(tmp_path) as it:
            assert (await it.progress())["run"]["status"] == "stopped"

    asyncio.run(scenario())


def test_an_open_assignment_is_told_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            first, again = await device.work(layout), await device.work(layout)
            assert again.pop("window_s") <= first.pop("window_s")
            assert first == again

    asyncio.run(scenario())


def test_a_client_that_does_not_wait_can_still_be_chosen(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, LateClock()) as it:  # it counts as waiting for a little while
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            devices = await it.devices(2)
            assert (await devices[0].check_in(layout, wait_s=0.0)).json()["assignment"] is None
            assert (await devices[1].work(layout))["id"] == "demo.1.1.d1"
            assert (await devices[0].check_in(layout, wait_s=0.0)).json()["assignment"]["id"] == "demo.1.1.d0"

    asyncio.run(scenario())


def test_requests_that_are_held_open_end_when_the_coordinator_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            [device] = await it.devices(1)
            held = asyncio.create_task(device.check_in(layout, wait_s=20.0))
            await until_told("a client that waits", (await it.driver()).waiting.candidates)
            it.state.coordinator.hang_up()
            answer = await held
            assert problem(answer) == "shutting-down"
            assert answer.headers["retry-after"] == "1"

    asyncio.run(scenario())


def values_of(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.n_values, generator=torch.Generator().manual_seed(seed))


def test_a_round_gives_exactly_the_weighted_mean(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            start = small_state()
            layout = await it.begin(run_file(), start)
            devices = await it.devices(3)
            answers = await asyncio.gather(
                *(device.take_part(layout, values_of(layout, i)) for i, device in enumerate(devices))
            )
            assert {answer["outcome"] for answer in answers} == {"accepted"}
            [record] = await it.ended(1)
            total = GridAccumulator(layout.n_values, Grid.finest(max_abs=8.0, total_weight_max=3000))
            for i in range(3):
                total.fold_vector(values_of(layout, i), 10)
            master = next_master(layout, master_of(layout, start), total)
            expected = layout.full_state(published_state(layout, master))
            model = await it.model(record["model_sha256"])
            assert model.keys() == expected.keys()
            for name, tensor in expected.items():
                assert model[name].dtype == tensor.dtype
                assert torch.equal(model[name], tensor), name
            assert (record["reported"], record["selected"], record["committed"]) == (3, 3, True)

    asyncio.run(scenario())
