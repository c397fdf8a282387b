"""Secure rounds over HTTP: the mean comes out, nothing else does, and who drops out when is survived or said."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.server_device import Device, House, Json, LateClock, house, pass_time, run_file
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.secagg.numbers.contribution import LocalWork

pytestmark = pytest.mark.usefixtures("any_database_in_time")
STATE = {"w": torch.zeros(3000)}
LAYOUT = Layout.of_state(STATE)
SECURE = """\
[codec]
name = "integer"
step = 0.25
first_norm = 0.55
[secure_aggregation]
expected_sample_count = 10
minimum_work = 0.5
"""


def secure_run(count: int = 1, target: int = 4, minimum: int = 3, window_s: float = 600.0) -> str:
    return run_file(count=count, target=target, minimum=minimum, over_selection=1.0, window_s=window_s) + SECURE


def test_the_model_moves_by_the_weighted_mean_and_the_record_has_sums_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(secure_run(count=3), STATE)
            before = STATE["w"].double()
            devices = await it.devices(4, sample_count=0)
            for number in (1, 2, 3):
                works = [LocalWork(5 * (i + 1), 3, 4, {"loss": float(i)}) for i in range(4)]
                changes = [change_of(LAYOUT, 10 * number + i) for i in range(4)]
                parties = [SecureDevice(one, LAYOUT, work) for one, work in zip(devices, works, strict=True)]
                told = await asyncio.gather(
                    *(one.take_part(change) for one, change in zip(parties, changes, strict=True))
                )
                assert [one["outcome"] for one in told] == ["accepted"] * 4
                record = (await it.ended(number))[-1]
                assert record["committed"], record["reason"]
                assert (record["sample_count"], record["partial"]) == (50, 4)
                assert record["metrics"] == {"loss": pytest.approx((0 * 5 + 1 * 10 + 2 * 15 + 3 * 20) / 50)}
                assert {one["sample_count"] for one in record["clients"]} == {0}
                after = (await it.model(record["model_sha256"]))["w"].double()
                weights = torch.tensor([work.sample_count for work in works], dtype=torch.float64)
                mean = (weights[:, None] * torch.stack(changes).double()).sum(0) / 50
                error = float((after - before - mean).norm() / mean.norm())
                assert error < 0.1, f"round {number}"
                before = after

    asyncio.run(scenario())


PRIVATE = SECURE + "[privacy]\nepsilon = 8.0\ndelta = 1e-5\nclip_norm = 0.5\n"


def private_run(count: int = 2) -> str:
    return run_file(count=count, target=4, minimum=3, over_selection=1.0, window_s=600.0) + PRIVATE


def test_a_private_round_has_its_noise_counts_what_it_costs_and_says_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(private_run(), STATE)
            devices = await it.devices(4, sample_count=0)
            before, costs = STATE["w"].double(), list[float]()
            for number in (1, 2):
                parties = [SecureDevice(one, LAYOUT) for one in devices]
                await asyncio.gather(*(one.take_part(torch.zeros(LAYOUT.n_values)) for one in parties))
                record = (await it.ended(number))[-1]
                assert record["committed"], record["reason"]
                assert (record["sample_count"], record["metrics"]) == (4, {}), "each client counts as one"
                costs.append(record["epsilon"])
                after = (await it.model(record["model_sha256"]))["w"].double()
                noise = parties[0].offer.secure.plan.noise  # type: ignore[union-attr]
                step = 1 / parties[0].offer.codec.inverse_step
                expected = step * (4 * noise.variance_per_client) ** 0.5 / 4  # type: ignore[union-attr]
                assert float((after - before).std()) == pytest.approx(expected, rel=0.1)
                before = after
            assert 0 < costs[0] < costs[1] <= 8.0
            run = (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()
            assert run["privacy"] == {"epsilon": costs[1], "delta": 1e-5, "budget": 8.0, "sums": 2, "sums_max": 2}

    asyncio.run(scenario())


def test_before_its_first_round_a_private_run_has_cost_nothing_and_names_the_list_that_it_is_bound_to(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            bound = private_run().replace("[privacy]", f'members_sha256 = "{"7f" * 32}"\n[privacy]')
            await it.begin(bound, STATE)
            [run] = (await it.http.get("/v1/admin/runs", headers=it.admin)).json()
            assert run["privacy"] == {"epsilon": 0.0, "delta": 1e-5, "budget": 8.0, "sums": 0, "sums_max": 2}
            assert run["members_sha256"] == "7f" * 32

    asyncio.run(scenario())


def test_of_a_run_without_noise_no_cost_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(secure_run(), STATE)
            run = (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()
            assert (run["privacy"], run["members_sha256"]) == (None, "")

    asyncio.run(scenario())


async def reveal_in_vain(it: House, clock: LateClock, devices: Sequence[Device]) -> Json:
    """Take part up to where one of four reveals its shares, and the others none; the attempt's record."""
    parties = [SecureDevice(one, LAYOUT) for one in devices]
    await asyncio.gather(*(one.begin() for one in parties))
    for step in ("advertise", "share", "hear"):
        await asyncio.gather(*(getattr(one, step)() for one in parties))
    for one in parties:
        assert (await one.send_input(one.masked(torch.zeros(LAYOUT.n_values)))).status_code == 200
    await asyncio.gather(*(one.agree() for one in parties))
    revealed = parties[0].party.reveal(await parties[0].get("unmasking"))
    assert (await parties[0].put("unmasking", revealed)).status_code == 202
    assert (await it.progress())["run"]["privacy"]["sums"] == 1, "it may be known already"
    await pass_time(it, clock, 301.0)  # half of the window
    return (await it.ended(1))[-1]


def test_what_was_revealed_in_vain_costs_too_and_the_run_stops_at_its_budget(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(private_run(), STATE)
            devices = await it.devices(4, sample_count=0)
            failed = await reveal_in_vain(it, clock, devices)
            assert not failed["committed"]
            assert "fewer than 3 of 4 clients revealed shares" in failed["reason"]
            assert failed["epsilon"] > 0
            spent = (await it.progress())["run"]["privacy"]
            assert (spent["sums"], spent["epsilon"]) == (1, failed["epsilon"])

            again = [SecureDevice(one, LAYOUT) for one in devices]
            await asyncio.gather(*(one.take_part(torch.zeros(LAYOUT.n_values)) for one in again))
            assert (await it.ended(2))[-1]["committed"]
            run = (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()
            assert run["status"] == "finished", "of two rounds one was done, and two sums were revealed"
            assert "privacy budget" in run["reason"]
            assert run["privacy"]["sums"] == 2

    asyncio.run(scenario())


def test_a_run_whose_last_sum_was_revealed_in_vain_has_spent_its_budget(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = LateClock()
        async with house(tmp_path, clock) as it:
            await it.begin(private_run(count=1), STATE)
            failed = await reveal_in_vain(it, clock, await it.devices(4, sample_count=0))
            run = (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()
            assert (run["status"], run["rounds_done"]) == ("finished", 0)
            assert (run["privacy"]["sums"], run["privacy"]["epsilon"]) == (1, failed["epsilon"])

    asyncio.run(scenario())
