"""`metrics = "all"` over HTTP: what clients measure reaches the record under names that no run file lists."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from tests.federations.audit_house import bundles, operating
from tests.federations.secure_cohort import LAYOUT, SECURE, STATE, Attempt
from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.server_device import AttendedClock, Device, House, Json, house, run_file
from umbel.aggregation.secagg.numbers.composition import N_COUNTS
from umbel.aggregation.secagg.numbers.contribution import Contribution, LocalWork, measured
from umbel.aggregation.secagg.turns import Phase
from umbel.client.cli.audit import audit_run

ALL = 'metrics = "all"\nevaluation = "all"\n'
FEW = "fewer than 3 clients have it, which is the minimum of this round"
METRICS: tuple[dict[str, float], ...] = (
    {"loss": 0.5, "dice/left-lung": 0.25, "only.here": 1.0},
    {"loss": 1.0, "dice/left-lung": 0.5},
    {"loss": 1.5, "dice/left-lung": 0.75, "pair": 3.0},
    {"loss": 2.0, "pair": 5.0},
)


def secure_run(count: int = 1, extra: str = "") -> str:
    return run_file(count=count, target=4, minimum=3, over_selection=1.0, window_s=600.0) + extra + SECURE + ALL


async def take_part(devices: Sequence[Device], works: Sequence[LocalWork]) -> list[SecureDevice]:
    parties = [SecureDevice(one, LAYOUT, work) for one, work in zip(devices, works, strict=True)]
    await asyncio.gather(*(one.take_part(change_of(LAYOUT, i)) for i, one in enumerate(parties)))
    return parties


async def the_record(it: House, number: int = 1) -> Json:
    record = (await it.ended(number))[-1]
    assert record["committed"], record["reason"]
    return record


def works(*more: Mapping[str, float]) -> list[LocalWork]:
    """Of four clients with 10, 20, 30 and 40 samples. `more`: metrics of each of the first ones."""
    others = [*more, *[{}] * (4 - len(more))]
    return [LocalWork(10 * (i + 1), 4, 4, {**METRICS[i], **others[i]}) for i in range(4)]


def test_clients_with_different_metrics_have_them_all_in_the_record_and_the_audit_fits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            stop = '[stop]\nmetric = "training.dice/left-lung"\nmode = "max"\ntarget = 0.5\nminimum = 1\n'
            await it.begin(secure_run(3, stop + "[training]\nevaluate = true\n"), STATE)
            devices = await it.devices(4, sample_count=0)
            weighted = [
                replace(
                    work,
                    weights={"recall": 3 * i},
                    metrics={**work.metrics, "recall": 0.5} if i else work.metrics,
                    evaluation={"auc": 0.5 + i / 8},
                    evaluation_sample_count=8,
                )
                for i, work in enumerate(works())
            ]
            parties = await take_part(devices, weighted)
            record = await the_record(it)
            assert record["metrics"] == {
                "loss": pytest.approx((0.5 * 10 + 1.0 * 20 + 1.5 * 30 + 2.0 * 40) / 100),
                "dice/left-lung": pytest.approx((0.25 * 10 + 0.5 * 20 + 0.75 * 30) / 60),
                "recall": pytest.approx(0.5),
            }
            assert record["evaluation"] == {"auc": pytest.approx(0.5 + 6 / 32)}
            assert record["not_shown"] == {"training.only.here": FEW, "training.pair": FEW}
            assert record["judged"]["clients"] == 3
            assert record["judged"]["value"] == record["metrics"]["dice/left-lung"]
            offer = parties[0].offer.secure
            assert offer is not None
            assert (offer.plan.metrics, offer.plan.evaluation) == ("all", "all")
            run = (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()
            assert run["reason"].startswith("stopped early after round 1 of 3: training.dice/left-lung has reached")
            signed = (await bundles(it))[-1]["bundle"]["facts"]
            assert signed["metrics"] == record["metrics"]
            await operating(it, lambda operator: audit_run(operator, "demo", None, as_json=True))

    asyncio.run(scenario())


def test_metrics_of_an_evaluation_need_not_be_listed_either(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(secure_run(1, "[training]\nevaluate = true\n"), STATE)
            devices = await it.devices(4, sample_count=0)
            await take_part(devices, works())
            await the_record(it)
            found = [measured({"auc": 0.5, **({"few": 1.0} if i else {})}, {}, 10 * i) for i in range(4)]
            parties = [SecureDevice(one, LAYOUT, work) for one, work in zip(devices, found, strict=True)]
            await asyncio.gather(*(one.take_part(torch.zeros(0)) for one in parties))
            record = await the_record(it, 2)
            assert record["task"] == "evaluation"
            assert record["evaluation"] == {"auc": 0.5, "few": 1.0}
            assert "not_shown" not in record or not record["not_shown"]

    asyncio.run(scenario())


def test_the_metrics_of_a_client_that_drops_out_are_not_in_the_sum_and_the_others_are(tmp_path: Path) -> None:
    """It has sealed shares, and then says nothing. Its masks come off with the shares of the others."""

    async def scenario() -> None:
        late = AttendedClock()
        async with house(tmp_path, clock=late) as it:
            await it.begin(secure_run(), STATE)
            devices = await it.devices(4, sample_count=0)
            attempt = Attempt.of(it, late, devices)
            for one, work in zip(attempt.parties, works({}, {"all.three": 1.0}, {"all.three": 2.0}), strict=True):
                one.work = work
            await attempt.go(silent=(0,), since=Phase.MASKED_INPUT)
            record = await the_record(it)
            assert record["reported"] == 3
            assert record["metrics"] == {"loss": pytest.approx((1.0 * 20 + 1.5 * 30 + 2.0 * 40) / 90)}
            assert set(record["not_shown"]) == {"training.all.three", "training.dice/left-lung", "training.pair"}

    asyncio.run(scenario())


def test_a_record_says_that_clients_have_more_metrics_than_the_sum_has_room_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            text = run_file(target=12, minimum=3, over_selection=1.0, window_s=600.0) + SECURE + ALL
            await it.begin(text, STATE)
            devices = await it.devices(12, sample_count=0)
            many = [LocalWork(10, 4, 4, {f"m{i}.{n}": 1.0 for n in range(32)}) for i in range(12)]
            await take_part(devices, many)
            record = await the_record(it)
            assert "more metrics than a masked sum has room for" in record["not_shown"]["training.*"]

    asyncio.run(scenario())


@dataclass
class Liar(SecureDevice):
    """Adds words of its own to the table of metrics."""

    lies: list[int] = field(default_factory=list[int])

    def contribution(self, change: torch.Tensor, work: LocalWork | None = None) -> Contribution:
        made = super().contribution(change, work)
        words = made.words.clone()
        words[N_COUNTS : N_COUNTS + len(self.lies)] += torch.tensor(self.lies)
        return replace(made, words=words)


def test_a_client_that_fills_the_table_with_noise_hides_the_metrics_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(secure_run(), STATE)
            devices = await it.devices(4, sample_count=0)
            noise = torch.randint(-(1 << 62), 1 << 62, (2880,), generator=torch.Generator().manual_seed(3)).tolist()
            parties = [SecureDevice(one, LAYOUT, work) for one, work in zip(devices, works(), strict=True)]
            parties[0] = Liar(devices[0], LAYOUT, works()[0], lies=noise)
            await asyncio.gather(*(one.take_part(change_of(LAYOUT, i)) for i, one in enumerate(parties)))
            record = await the_record(it)
            assert record["metrics"] == {}
            assert list(record["not_shown"]) == ["training.*"]
            assert record["sample_count"] == 100

    asyncio.run(scenario())
