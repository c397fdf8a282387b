"""Counts over HTTP: the real coordinator adds them up, derives figures, keeps each site's own, and signs the sums."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import metrics as oracle
from torch import Tensor

from tests.federations.audit_house import bundles, operating
from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.server_device import Device, House, Json, house, problem, rows, run_file, small_state, update_of
from umbel.aggregation.counts import NUMBERS_MAX
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.secagg.numbers.contribution import LocalWork
from umbel.client.cli.audit import audit_run
from umbel.client.training.counts import confusion_counts, score_histogram

BINS = 16
SITES = (40, 25, 60)  # samples; the last one has no positive


def held_out(site: int) -> tuple[Tensor, Tensor]:
    """Logits and targets of one site."""
    drawn = torch.Generator().manual_seed(site)
    target = torch.randint(0, 2, (SITES[site],), generator=drawn) if site < 2 else torch.zeros(SITES[site]).long()
    return torch.randn(SITES[site], generator=drawn) + 1.5 * target, target


def counts_of(site: int) -> dict[str, tuple[int, ...]]:
    logits, target = held_out(site)
    found = {
        "confusion": confusion_counts(logits, target),
        "scores": score_histogram(logits.sigmoid(), target, BINS),
    }
    return {name: tuple(numbers.tolist()) for name, numbers in found.items()}


def pooled() -> tuple[Tensor, Tensor]:
    logits, targets = zip(*(held_out(site) for site in range(len(SITES))), strict=True)
    return torch.cat(logits), torch.cat(targets)


def require_figures(found: Mapping[str, float]) -> None:
    """Those of all samples together."""
    logits, target = pooled()
    said = (logits > 0).long()
    assert found["confusion.sensitivity"] == pytest.approx(oracle.recall_score(target, said))
    assert found["confusion.specificity"] == pytest.approx(oracle.recall_score(target, said, pos_label=0))
    assert found["confusion.f1"] == pytest.approx(oracle.f1_score(target, said))
    assert abs(found["scores.auc"] - oracle.roc_auc_score(target, logits)) <= found["scores.auc_error_max"]
    assert found["scores.auc_error_max"] < 0.1


def require_sums(record: Json) -> None:
    counts = [counts_of(site) for site in range(len(SITES))]
    sums = {name: [sum(column) for column in zip(*(one[name] for one in counts), strict=True)] for name in counts[0]}
    assert record["evaluation_counts"] == sums
    require_figures(record["evaluation"])


async def train(layout: Layout, device: Device, **reported: object) -> None:
    assignment = await device.work(layout)
    update = update_of(layout, torch.ones(layout.n_values))
    assert (await device.upload(assignment["id"], update)).status_code == 201
    answer = await device.report(assignment["id"], update, **reported)
    assert answer.status_code == 200, answer.text


async def audited(it: House) -> Sequence[Json]:
    """The facts of all attempts, after an audit of the whole chain."""
    await operating(it, lambda operator: audit_run(operator, "demo", None, as_json=True))
    return [one["bundle"]["facts"] for one in await bundles(it)][1:]


def test_a_plain_round_has_the_figures_of_all_sites_together_and_of_each(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            text = run_file(target=len(SITES)) + "[retention]\nper_site_metrics = true\n"
            layout = await it.begin(text, small_state())
            reports: list[dict[str, Any]] = [
                {
                    "evaluation": {"loss": 0.5},
                    "evaluation_sample_count": SITES[site],
                    "evaluation_counts": counts_of(site),
                    "counts": {"lesions": [site]},
                }
                for site in range(len(SITES))
            ]
            devices = await it.devices(len(SITES))
            await asyncio.gather(*(train(layout, one, **said) for one, said in zip(devices, reports, strict=True)))
            [record] = await it.ended(1)
            require_sums(record)
            assert (record["counts"], record["metrics"]) == ({"lesions": [3]}, {})
            own = [one["evaluation"] for one in record["clients"]]
            assert all(one["loss"] == 0.5 for one in own)
            assert [("confusion.sensitivity" in one, "scores.auc" in one) for one in own] == [
                (True, True),
                (True, True),
                (False, False),
            ]
            assert own[0]["confusion.accuracy"] == pytest.approx(_accuracy(0))
            [facts] = await audited(it)
            assert (facts["counts"], facts["evaluation_counts"]) == (record["counts"], record["evaluation_counts"])

    asyncio.run(scenario())


def _accuracy(site: int) -> float:
    logits, target = held_out(site)
    return float(oracle.accuracy_score(target, logits > 0))


def test_a_masked_round_has_the_same_figures_and_no_sites_own(tmp_path: Path) -> None:
    """What too few sites counted is left out."""
    state = {"w": torch.zeros(300)}
    layout = Layout.of_state(state)
    lengths = f"{{ confusion = 4, scores = {2 * BINS} }}"
    text = run_file(target=len(SITES), minimum=3) + (
        f'[codec]\nname = "integer"\n[secure_aggregation]\nevaluation_counts = {lengths}\ncounts = {{ lesions = 1 }}\n'
    )

    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(text, state)
            works = [
                LocalWork(
                    10,
                    4,
                    4,
                    evaluation={"loss": 0.5},
                    evaluation_sample_count=SITES[site],
                    evaluation_counts=counts_of(site),
                    counts={"lesions": (1,)} if site else {"other": (1,)},
                )
                for site in range(len(SITES))
            ]
            devices = await it.devices(len(SITES), sample_count=0)
            parties = [SecureDevice(one, layout, work) for one, work in zip(devices, works, strict=True)]
            await asyncio.gather(*(one.take_part(change_of(layout, i)) for i, one in enumerate(parties)))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            require_sums(record)
            assert (record["counts"], record["evaluation"]["loss"]) == ({}, 0.5)
            assert all(not one["evaluation"] for one in record["clients"])
            [facts] = await audited(it)
            assert facts["evaluation_counts"] == record["evaluation_counts"]
            assert "counts" not in facts

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"counts": {"n": [-1]}}, "malformed-request"),
        ({"counts": {"n": [(1 << 40) + 1]}}, "malformed-request"),
        ({"counts": {"n": [0.5]}}, "malformed-request"),
        ({"counts": {"n": []}}, "malformed-request"),
        ({"counts": {"n": 3}}, "malformed-request"),
        ({"counts": [1, 2]}, "malformed-request"),
        ({"counts": {"a b": [1]}}, "malformed-request"),
        ({"counts": {f"n{i}": [1] for i in range(65)}}, "malformed-request"),
        ({"counts": {"n": [0] * (NUMBERS_MAX + 1)}}, "malformed-request"),
        ({"counts": {"n": [0] * 50_000}}, "body-too-large"),
        ({"evaluation_counts": {"n": [1]}}, "malformed-request"),
        ({"counts": {"confusion": [1] * 9}}, "report-refused"),
    ],
)
def test_counts_out_of_bounds_are_refused_and_change_nothing(
    tmp_path: Path, changed: dict[str, object], kind: str
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            rehearsal = "[secure_aggregation]\nenabled = false\ncounts = { confusion = 4 }\n"
            layout = await it.begin(run_file(target=1) + rehearsal, small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            update = update_of(layout, torch.ones(layout.n_values))
            await device.upload(assignment["id"], update)
            before = rows(it.settings)
            assert problem(await device.report(assignment["id"], update, **changed)) == kind
            assert rows(it.settings) == before
            most = {f"n{i}": [1 << 40] * 64 for i in range(NUMBERS_MAX // 64)}
            assert len(json.dumps(most)) < 1 << 16
            accepted = await device.report(assignment["id"], update, counts=most)
            assert accepted.json()["outcome"] == "accepted", accepted.text
            [record] = await it.ended(1)
            assert record["counts"] == most

    asyncio.run(scenario())
