"""Rounds in which clients that did not train measure the model, and runs that end early by what was measured."""

import asyncio
from pathlib import Path

import pytest

from tests.federations.lifecycle_house import lifecycle_run, measure, obeyed, order, train, vector, versions
from tests.federations.server_device import (
    Device,
    House,
    LateClock,
    house,
    pass_time,
    problem,
    small_state,
    stored_updates,
    update_of,
)
from tests.servers.waits import until_told
from umbel.aggregation.model.layout import Layout

pytestmark = pytest.mark.usefixtures("any_database_in_time")
LAYOUT = Layout.of_state(small_state())
EVALUATION = "[evaluation]\nevery = 1\nclients = 2\n"


def test_those_who_did_not_train_measure_the_model_and_send_no_update(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(EVALUATION, count=1), small_state())
            devices = await it.devices(3)
            await train(devices[0], LAYOUT, 0.5)
            trained = asyncio.create_task(devices[0].check_in(LAYOUT, wait_s=20.0))
            tasks = await asyncio.gather(*(device.work(LAYOUT) for device in devices[1:]))
            [first, second] = tasks
            newest = (await versions(it))[1]
            assert [task["task"] for task in tasks] == ["evaluation"] * 2
            assert first["id"] == "demo.1.e1.d1"
            assert (first["model"]["version"], first["model"]["sha256"]) == (1, newest["sha256"])
            assert problem(await devices[1].upload(first["id"], b"update")) == "report-refused"
            update = update_of(LAYOUT, vector(LAYOUT, 1.0))
            assert problem(await devices[1].report(first["id"], update)) == "report-refused"
            assert problem(await measure(devices[1], first, 2000, loss=1.0)) == "report-refused"
            assert problem(await measure(devices[1], first, 0, loss=1.0)) == "malformed-request"
            told = await measure(devices[1], first, 10, loss=1.0, accuracy=0.5)
            assert told.json() == {"outcome": "accepted", "reason": "the report counts"}
            assert (await measure(devices[1], first, 10, loss=1.0, accuracy=0.5)).json() == told.json()
        async with house(tmp_path) as it:  # what was measured outlives a restart
            for device in devices:
                device.http = it.http
            again = await devices[2].work(LAYOUT)
            assert again["id"] == second["id"]
            await measure(devices[2], again, 30, loss=2.0)
            record = (await it.ended(2))[1]
            assert (record["task"], record["round"], record["committed"]) == ("evaluation", 1, True)
            assert (record["model_version"], record["model_sha256"]) == (1, newest["sha256"])
            assert record["evaluation"] == {"loss": 1.75, "accuracy": 0.5}
            assert (record["selected"], record["reported"], record["sample_count"]) == (2, 2, 40)
            progress = (await it.progress())["run"]
            assert (progress["status"], progress["rounds_done"]) == ("finished", 1)
            found = await versions(it)
            assert len(found) == 2, "an evaluation makes no model"
            assert (found[0]["evaluation"], found[1]["evaluation"]) == ({}, {"loss": 1.75, "accuracy": 0.5})
            assert stored_updates(it.settings) == []
        assert trained.done()

    asyncio.run(scenario())


def test_where_everybody_trains_nobody_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(lifecycle_run(EVALUATION, count=2), small_state())
            [device] = await it.devices(1)
            for number, value in enumerate((0.5, 1.0), start=1):
                await train(device, LAYOUT, value)
                await it.ended(2 * number - 1)
                await pass_time(it, clock, 31.0)  # as long as a round waits for more clients
            ended = await it.ended(4)
            assert [(one["task"], one["round"], one["committed"]) for one in ended] == [
                ("training", 1, True),
                ("evaluation", 1, False),
                ("training", 2, True),
                ("evaluation", 2, False),
            ]
            assert "there is nobody to measure the model" in ended[1]["reason"]
            assert (await it.progress())["run"]["status"] == "finished"

    asyncio.run(scenario())


def test_clients_without_held_out_data_do_not_hold_up_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(EVALUATION, count=1), small_state())
            devices = await it.devices(3)
            await train(devices[0], LAYOUT, 0.5)
            for device, task in zip(
                devices[1:], await asyncio.gather(*(one.work(LAYOUT) for one in devices[1:])), strict=True
            ):
                await device.send("PUT", f"/v1/assignments/{task['id']}/decline", b'{"reason": "no held-out data"}')
            record = (await it.ended(2))[1]
            assert not record["committed"]
            assert [client["fate"] for client in record["clients"]] == ["declined"] * 2
            assert (await it.progress())["run"]["status"] == "finished"

    asyncio.run(scenario())


def test_an_evaluation_may_be_cut_short_by_a_pause_or_a_rollback(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(EVALUATION, count=3), small_state())
            devices = await it.devices(3)
            for verb, body in (("pause", {"now": True}), ("rollback", {"to": 0})):
                await train(devices[0], LAYOUT, 0.5)
                [one, _] = await asyncio.gather(*(device.work(LAYOUT) for device in devices[1:]))
                await it.nobody_waits()  # after a rollback the next round begins at once, and must ask d0
                await obeyed(it, verb, **body)
                assert (await measure(devices[1], one, 10, loss=1.0)).json()["outcome"] == "abandoned"
                await obeyed(it, "resume")
            ended = await it.ended(4)
            assert [(one["task"], one["round"]) for one in ended] == [
                ("training", 1),
                ("evaluation", 1),
                ("training", 2),
                ("evaluation", 2),
            ]
            assert (await train(devices[0], LAYOUT, 0.5))["model"]["version"] == 3

    asyncio.run(scenario())


STOP = '[stop]\nmetric = "evaluation.loss"\npatience = 2\nmin_delta = 0.05\nminimum = 1\n'


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends_and_says_what_was_best_over_restarts(tmp_path: Path) -> None:
    async def scenario() -> None:
        losses, devices = (1.0, 0.5, 0.48, 0.6), list[Device]()
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(STOP, evaluate="true"), small_state())
            devices += await it.devices(1)
        for n_ended, loss in enumerate(losses, start=1):  # each measured before training: of versions 0, 1, 2 and 3
            async with house(tmp_path) as it:
                devices[0].http = it.http
                await train(devices[0], LAYOUT, 0.5, {"loss": loss})
                await it.ended(n_ended)
        async with house(tmp_path) as it:
            run = (await it.progress())["run"]
            assert (run["status"], run["rounds_done"]) == ("finished", 4)
            assert run["reason"] == (
                "stopped early after round 4 of 9: evaluation.loss has not improved by more than 0.05 in 2"
                " measurements; the best is 0.48, of version 2 (the mean over 1 client)"
            )
            assert [one["evaluation"] for one in await versions(it)] == [*({"loss": loss} for loss in losses), {}]

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database_in_time")
def test_one_liar_of_ten_neither_ends_a_run_nor_makes_its_version_the_best(tmp_path: Path) -> None:
    more = '[evaluation]\nevery = 1\nclients = 10\n[stop]\nmetric = "evaluation.loss"\ntarget = 0.5\n'
    lie, honest = (1000, -1e30), (10, 1.0)

    async def measured(devices: list[Device], loss: float) -> None:
        """The liar claims as many samples as it may, and a loss that no mean survives."""
        tasks = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
        for i, (device, task) in enumerate(zip(devices, tasks, strict=True)):
            n_samples, value = lie if i == 4 else (honest[0], loss)
            assert (await measure(device, task, n_samples, loss=value)).json()["outcome"] == "accepted"

    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(more), small_state())
            trainer, *others = await it.devices(11)
            for loss in (1.0, 0.75):
                await train(trainer, LAYOUT, 0.5)
                await measured(others, loss)
            record = (await it.ended(4))[1]
            assert record["evaluation"]["loss"] < -1e28, "what the clients say, liars and all"
            assert record["judged"] == {
                "metric": "evaluation.loss",
                "value": 1.0,
                "clients": 10,
                "why": "the mean over 8 of 10 clients, without the 1 least and the 1 greatest",
            }
            assert (await it.progress())["run"]["status"] == "running"
            assert [(one["judged"], one["is_best"]) for one in await versions(it)] == [
                (None, False),
                (1.0, False),
                (0.75, True),
            ]
            assert (await obeyed(it, "rollback", to="best"))["model"]["version"] == 2, "it stands there"
            await train(trainer, LAYOUT, 0.5)
            await measured(others, 0.45)
            await it.ended(6)
            assert (await it.progress())["run"]["reason"] == (
                "stopped early after round 3 of 9: evaluation.loss has reached its target of 0.5: 0.45, of version 3 "
                "(the mean over 8 of 10 clients, without the 1 least and the 1 greatest)"
            )

    asyncio.run(scenario())


async def n_waiting(it: House, count: int) -> bool:
    """Whether so many clients wait for an evaluation."""
    live = (await it.progress())["live"]
    return bool(live["task"] == "evaluation" and live["waiting"] == count)


def test_two_clients_alone_decide_nothing_and_the_record_says_so(tmp_path: Path) -> None:
    more = '[evaluation]\nevery = 1\nclients = 3\nwindow_s = 60.0\n[stop]\nmetric = "evaluation.loss"\ntarget = 0.5\n'

    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(lifecycle_run(more), small_state())
            trainer, *others = await it.devices(3)
            await train(trainer, LAYOUT, 0.5)
            working = [asyncio.create_task(one.work(LAYOUT)) for one in others]
            await until_told("both clients waiting", lambda: n_waiting(it, 2))
            await pass_time(it, clock, 7.0)  # as long as such a round waits for a third; a check-in is held for longer
            for device, task in zip(others, await asyncio.gather(*working), strict=True):
                await measure(device, task, 10, loss=0.1)
            judged = (await it.ended(2))[1]["judged"]
            assert judged["value"] is None
            assert judged["why"] == "2 clients have measured it, and it counts only if at least 3 do"
            assert (await it.progress())["run"]["status"] == "running"
            assert [one["judged"] for one in await versions(it)] == [None, None]

    asyncio.run(scenario())


def test_a_target_ends_a_run_and_the_best_can_be_gone_back_to_before(tmp_path: Path) -> None:
    more = '[stop]\nmetric = "evaluation.accuracy"\nmode = "max"\ntarget = 0.9\nminimum = 1\n'

    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(lifecycle_run(more, evaluate="true"), small_state())
            [device] = await it.devices(1)
            assert "was not measured" in (await order(it, "rollback", to="best")).json()["detail"]
            for n_ended, accuracy in enumerate((0.5, 0.7, 0.6), start=1):
                await train(device, LAYOUT, 0.5, {"accuracy": accuracy})
                await it.ended(n_ended)
            assert [one["version"] for one in await versions(it, "?after=0&limit=2") if one["is_best"]] == [1]
            assert (await obeyed(it, "rollback", to="best"))["model"]["version"] == 4
            assert (await versions(it))[4]["rolled_back_to"] == 1
            await train(device, LAYOUT, 0.5, {"accuracy": 0.95})
            await it.ended(5)
            run = (await it.progress())["run"]
            assert run["status"] == "finished"
            assert "has reached its target of 0.9: 0.95, of version 4" in run["reason"]

    asyncio.run(scenario())
