"""Evaluations under masks over HTTP: the last model is measured by all sites, and only sums of what they measured come
out.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.federations.audit_house import operating
from tests.federations.secure_cohort import Attempt
from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.server_device import Device, House, Json, LateClock, house, run_file
from tests.server.secure.test_secure_rounds import LAYOUT, SECURE, STATE
from umbel.aggregation.secagg.numbers.contribution import LocalWork, measured
from umbel.aggregation.secagg.turns import Phase
from umbel.client.cli.audit import audit_run

pytestmark = pytest.mark.usefixtures("any_database_in_time")
HELD_OUT = (30, 0, 20, 50)  # samples; the second site has none
CONFUSIONS = ((9, 1, 3, 17), (), (0, 2, 1, 17), (20, 5, 5, 20))


def secure_run(count: int, extra: str = "", listed: str = "evaluation_counts = { confusion = 4 }\n") -> str:
    text = run_file(count=count, target=4, minimum=3, over_selection=1.0, window_s=600.0)
    return text + extra + SECURE + listed


async def train(devices: Sequence[Device], number: int) -> list[SecureDevice]:
    work = LocalWork(5, 4, 4, {"loss": 0.5})
    parties = [SecureDevice(one, LAYOUT, work) for one in devices]
    changes = [change_of(LAYOUT, 10 * number + i) for i in range(len(devices))]
    await asyncio.gather(*(one.take_part(change) for one, change in zip(parties, changes, strict=True)))
    return parties


def measuring(devices: Sequence[Device]) -> list[SecureDevice]:
    """Each device's loss is its own number."""
    parties = list[SecureDevice]()
    for i, device in enumerate(devices):
        found = measured({"loss": float(i)}, {"confusion": CONFUSIONS[i]}, HELD_OUT[i]) if HELD_OUT[i] else measured()
        parties.append(SecureDevice(device, LAYOUT, found))
    return parties


async def measure(devices: Sequence[Device]) -> list[SecureDevice]:
    parties = measuring(devices)
    await asyncio.gather(*(one.take_part(torch.zeros(0)) for one in parties))
    return parties


def require_sums(record: Json) -> None:
    assert record["task"] == "evaluation"
    assert record["committed"], record["reason"]
    sums = [sum(column) for column in zip(*(one for one in CONFUSIONS if one), strict=True)]
    assert record["evaluation_counts"] == {"confusion": sums}
    positives = sums[0] + sums[2]
    assert record["evaluation"]["confusion.sensitivity"] == sums[0] / positives
    loss = sum(i * n for i, n in enumerate(HELD_OUT)) / sum(HELD_OUT)
    assert abs(record["evaluation"]["loss"] - loss) < 1e-6
    assert record["sample_count"] == sum(HELD_OUT)
    assert record["metrics"] == {}
    assert {one["sample_count"] for one in record["clients"]} == {0}


async def versions_of(it: House) -> list[Json]:
    return list((await it.http.get("/v1/admin/runs/demo/versions", headers=it.admin)).json())


def test_the_last_model_of_a_run_that_measures_the_others_is_measured_by_all_sites(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(secure_run(2, "[training]\nevaluate = true\n"), STATE)
            devices = await it.devices(4, sample_count=0)
            for number in (1, 2):
                await train(devices, number)
            await it.ended(2)
            await measure(devices)
            *_, record = await it.ended(3)
            require_sums(record)
            assert record["round"] == 2
            assert record["model_version"] == 2
            run = (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()
            assert (run["status"], run["reason"]) == ("finished", "all 2 rounds are committed")
            last = (await versions_of(it))[-1]
            assert last["evaluation"] == record["evaluation"]
            await operating(it, lambda operator: audit_run(operator, "demo", None, as_json=True))

    asyncio.run(scenario())


def test_evaluations_between_rounds_change_nothing_in_how_updates_are_sent(tmp_path: Path) -> None:
    """The rounds have the steps and bits that they have without evaluations, and the audit fits."""

    async def plans(folder: Path, extra: str, *, evaluates: bool) -> list[tuple[object, ...]]:
        found = list[tuple[object, ...]]()
        async with house(folder) as it:
            await it.begin(secure_run(3, extra), STATE)
            devices = await it.devices(4, sample_count=0)
            for number in (1, 2, 3):
                party = (await train(devices, number))[0]
                assert party.offer.secure is not None
                found.append((party.offer.codec, party.offer.secure.plan))
                if evaluates:
                    await it.ended(2 * number - 1)
                    evaluated = (await measure(devices))[0].offer
                    assert evaluated.task.value == "evaluation"
                    require_sums((await it.ended(2 * number))[-1])
            await operating(it, lambda operator: audit_run(operator, "demo", None, as_json=True))
        return found

    async def scenario() -> None:
        section = "[evaluation]\nevery = 1\nclients = 4\n"
        with_them = await plans(tmp_path / "with", section, evaluates=True)
        assert with_them == await plans(tmp_path / "without", "", evaluates=False)

    asyncio.run(scenario())


def test_metrics_of_an_evaluation_that_too_few_sites_have_stay_out_of_the_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(secure_run(1, "[training]\nevaluate = true\n"), STATE)
            devices = await it.devices(4, sample_count=0)
            await train(devices, 1)
            await it.ended(1)
            works = [measured({"loss": 1.0, **({"accuracy": 0.5} if i < 2 else {})}, {}, 10) for i in range(4)]
            parties = [SecureDevice(one, LAYOUT, work) for one, work in zip(devices, works, strict=True)]
            await asyncio.gather(*(one.take_part(torch.zeros(0)) for one in parties))
            record = (await it.ended(2))[-1]
            assert record["evaluation"] == {"loss": 1.0}
            why = "fewer than 3 clients have it, which is the minimum of this round"
            assert record["not_shown"] == {"evaluation.accuracy": why}

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", list(Phase), ids=str)
def test_after_a_restart_in_any_phase_the_evaluation_goes_on(phase: Phase, tmp_path: Path) -> None:
    """Half of the clients have sent their message of the phase when the coordinator is replaced."""

    async def scenario() -> None:
        phases, n = list(Phase), list(Phase).index(phase)
        async with house(tmp_path) as it:
            await it.begin(secure_run(1, "[training]\nevaluate = true\n"), STATE)
            devices = await it.devices(4, sample_count=0)
            await train(devices, 1)
            await it.ended(1)
            attempt = Attempt(it, LateClock(), measuring(devices), [torch.zeros(0)] * 4)
            await attempt.each(SecureDevice.begin)
            for one in phases[:n]:
                assert await attempt.speak(one, range(4))
            assert await attempt.speak(phase, (1, 3) if phase is not Phase.UNMASKING else (1,))
        async with house(tmp_path) as it:
            attempt.move_to(it)
            for one in phases[n:]:
                assert await attempt.speak(one, (0, 2) if one is phase is not Phase.UNMASKING else range(4))
            require_sums((await it.ended(2))[-1])

    asyncio.run(scenario())
