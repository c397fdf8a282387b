"""Rounds of the integer codec: the mean is right, the step follows the updates, and what does not fit is refused."""

import asyncio
import struct
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import Device, Json, house, problem, run_file, small_state, update_for
from umbel.aggregation.model.layout import Layout

pytestmark = pytest.mark.usefixtures("any_database_in_time")
STATE = {"w": torch.zeros(3000)}
LAYOUT = Layout.of_state(STATE)
RUN = run_file(count=4, target=3, minimum=2, window_s=60.0)
CODEC = '[codec]\nname = "integer"\nstep = 0.25\nfirst_norm = 5.0\n'
SCALE = 0.01  # of each update's values: their norm is 0.55, not 5


def values_of(i: int, number: int) -> torch.Tensor:
    return SCALE * torch.randn(LAYOUT.n_values, generator=torch.Generator().manual_seed(10 * number + i))


async def one_round(devices: list[Device], number: int) -> list[Json]:
    """Every device takes part; what each was asked."""
    assignments = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
    for i, (device, assignment) in enumerate(zip(devices, assignments, strict=True)):
        update = update_for(assignment, LAYOUT, values_of(i, number))
        assert (await device.upload(assignment["id"], update)).status_code == 201
        assert (await device.report(assignment["id"], update)).json()["outcome"] == "accepted"
    return assignments


@pytest.mark.slow
def test_the_model_moves_by_the_mean_and_the_step_follows_the_updates(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN + CODEC, STATE)
            devices, before = await it.devices(3), STATE["w"].double()
            steps, errors, sizes = list[float](), list[float](), list[int]()
            for number in (1, 2, 3, 4):
                assignments = await one_round(devices, number)
                record = (await it.ended(number))[-1]
                after = (await it.model(record["model_sha256"]))["w"].double()
                mean = sum(values_of(i, number).double() for i in range(3)) / 3
                steps.append(1 / assignments[0]["codec"]["inverse_step"])
                errors.append(float((after - before - mean).abs().max()))
                sizes += [one["bytes_up"] for one in record["clients"]]
                before = after
            assert steps[0] == pytest.approx(0.25 * 5.0 / 3000**0.5, rel=1e-6)
            for step, error in zip(steps, errors, strict=True):
                assert error <= 0.5001 * step
            assert steps[1:] == pytest.approx([0.25 * SCALE] * 3, rel=0.05)
            assert max(sizes) < LAYOUT.n_values * 4 / 7

    asyncio.run(scenario())


def test_everybody_in_the_cohort_has_a_rank_and_each_round_a_dither_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN + CODEC, STATE)
            devices = await it.devices(3)
            first, second = await one_round(devices, 1), await one_round(devices, 2)
            for assignments in (first, second):
                assert [one["rank"] for one in assignments] == [0, 1, 2]
                assert len({one["codec"]["key"] for one in assignments}) == 1
            assert first[0]["codec"]["key"] != second[0]["codec"]["key"]

    asyncio.run(scenario())


def test_an_attempt_that_was_abandoned_is_repeated_with_the_same_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN + CODEC, STATE)
            devices = await it.devices(3)
            await one_round(devices, 1)
            asked = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            for device, assignment in zip(devices, asked, strict=True):
                await device.send("PUT", f"/v1/assignments/{assignment['id']}/decline", b'{"reason": "no power"}')
            again = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            assert [one["attempt"] for one in again] == [2, 2, 2]
            assert [one["codec"] for one in again] == [one["codec"] for one in asked]

    asyncio.run(scenario())


async def serve(device: Device) -> float | None:
    """Do what is asked, if anything is; the step, if it is to train."""
    asked = (await device.check_in(LAYOUT, wait_s=0.1)).json()["assignment"]
    if asked is None:
        return None
    if asked["task"] == "evaluation":
        url = f"/v1/assignments/{asked['id']}/evaluation"
        await device.send("PUT", url, b'{"sample_count": 5, "evaluation": {"loss": 1.0}}')
        return None
    update = update_for(asked, LAYOUT, values_of(0, 1))
    probe = {"probe": {"steps_full": 4, "step_s": 0.01}} if asked["task"] == "canary" else {}
    assert (await device.upload(asked["id"], update)).status_code == 201
    told = await device.report(asked["id"], update, **probe)
    assert told.json()["outcome"] == "accepted", told.text
    return float(1 / asked["codec"]["inverse_step"])


def test_the_step_outlives_a_canary_and_an_evaluation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            sections = "[evaluation]\nevery = 1\nclients = 1\n[canary]\nclients = 2\n"
            await it.begin(RUN.replace("target = 3", "target = 2") + CODEC + sections, STATE)
            devices, steps = await it.devices(3), list[float]()
            while len(steps) < 6:  # the canary's two, and two rounds' of two; the last pass may reach a third round
                for device in devices:
                    if (step := await serve(device)) is not None:
                        steps.append(step)
            assert steps[:4] == [pytest.approx(0.25 * 5.0 / 3000**0.5, rel=1e-6)] * 4
            assert steps[4:6] == [pytest.approx(0.25 * SCALE, rel=0.05)] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("offset", "data", "kind"),
    [
        (5, b"\0", "wrong-codec"),
        (64, struct.pack("<f", 1.0), "wrong-codec"),
        (68, struct.pack("<f", 1e6), "update-out-of-range"),
        (72, struct.pack("<I", 1), "wrong-codec"),
        (76, b"\x05", "malformed-update"),
        (80, b"\0\0\0\0", "malformed-update"),
    ],
)
def test_an_update_that_does_not_fit_the_plan_is_refused(tmp_path: Path, offset: int, data: bytes, kind: str) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN.replace("target = 3", "target = 2") + CODEC, STATE)
            devices = await it.devices(2)
            assignment, _ = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            good = update_for(assignment, LAYOUT, values_of(0, 1))
            bad = good[:offset] + data + good[offset + len(data) :]
            assert problem(await devices[0].upload(assignment["id"], bad)) == kind
            too_long = good + bytes(100_000)
            assert problem(await devices[0].upload(assignment["id"], too_long)) == "lying-length"
            assert (await devices[0].upload(assignment["id"], good)).status_code == 201

    asyncio.run(scenario())


def test_a_client_whose_updates_are_refused_again_and_again_is_told_to_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN.replace("target = 3", "target = 2") + CODEC, STATE)
            devices = await it.devices(2)
            assignment, other = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            good = update_for(assignment, LAYOUT, values_of(0, 1))
            bad = good[:68] + struct.pack("<f", 1e6) + good[72:]
            told = [problem(await devices[0].upload(assignment["id"], bad)) for _ in range(6)]
            assert told == ["update-out-of-range"] * 5 + ["assignment-closed"]
            assert problem(await devices[0].upload(assignment["id"], good)) == "assignment-closed"
            mine = update_for(other, LAYOUT, values_of(1, 1))
            assert (await devices[1].upload(other["id"], mine)).status_code == 201

    asyncio.run(scenario())


def test_half_precision_and_counters_come_through(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2) + CODEC, small_state())
            devices = await it.devices(2)
            await asyncio.gather(*(device.take_part(layout, torch.ones(layout.n_values)) for device in devices))
            [record] = await it.ended(1)
            model = await it.model(record["model_sha256"])
            start, step = small_state(), 0.25 * 5.0 / layout.n_values**0.5
            for name in ("embed.weight", "half.weight", "norm.running_mean"):
                assert float((model[name].double() - start[name].double() - 1).abs().max()) <= 0.6 * step
            assert int(model["norm.num_batches_tracked"]) == 3 + (1 << 16), "a change of 1 in the vector is 2^16"

    asyncio.run(scenario())
