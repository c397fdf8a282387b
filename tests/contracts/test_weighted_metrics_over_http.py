"""A metric with a weight of its own is that of all samples together, in plain rounds and under masks."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sklearn import metrics as oracle

from tests.contracts.test_counts_over_http import SITES, pooled, train
from tests.contracts.test_counts_over_http import held_out as logits_of
from tests.federations.secure_device import SecureDevice, change_of
from tests.federations.server_device import Json, house, problem, run_file, small_state, update_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.secagg.numbers.contribution import LocalWork
from umbel.client import Evaluation, WeightedMean

WITHIN = 1e-6


def evaluation_of(site: int) -> Evaluation:
    """What a site's own code returns: the sensitivity over its positive samples. The last site has none."""
    logits, target = logits_of(site)
    positives = int(target.sum())
    found = (logits[target == 1] > 0).float().mean()  # no number without a positive sample
    accuracy = float(((logits > 0) == target.bool()).float().mean())
    return Evaluation(SITES[site], {"accuracy": accuracy, "sensitivity": WeightedMean(found, positives)})


def require_pooled(found: Json) -> None:
    logits, target = pooled()
    said = logits > 0
    assert abs(found["sensitivity"] - oracle.recall_score(target, said)) < WITHIN
    assert abs(found["accuracy"] - oracle.accuracy_score(target, said)) < WITHIN


def test_a_mean_weighted_by_samples_would_be_another() -> None:
    """So that the tests below compare with something that differs."""
    found = [evaluation_of(site) for site in range(2)]
    by_samples = sum(one.metrics["sensitivity"] * one.sample_count for one in found) / sum(SITES[:2])
    logits, target = pooled()
    assert abs(by_samples - oracle.recall_score(target, logits > 0)) > 100 * WITHIN
    assert "sensitivity" not in evaluation_of(2).metrics


def test_a_plain_round_has_the_sensitivity_of_all_sites_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            stop = '[stop]\nmetric = "evaluation.sensitivity"\nmode = "max"\ntarget = 1.0\nminimum = 2\n'
            training = "[training]\nevaluate = true\n"
            layout = await it.begin(run_file(target=len(SITES)) + training + stop, small_state())
            devices = await it.devices(len(SITES))
            found = [evaluation_of(site) for site in range(len(SITES))]
            reports: Sequence[dict[str, object]] = [
                {
                    "evaluation": dict(one.metrics),
                    "evaluation_sample_count": one.sample_count,
                    "evaluation_weights": dict(one.weights),
                    "metrics": {"perplexity": 2.0 + site},
                    "weights": {"perplexity": 10**site},
                }
                for site, one in enumerate(found)
            ]
            await asyncio.gather(*(train(layout, one, **said) for one, said in zip(devices, reports, strict=True)))
            [record] = await it.ended(1)
            require_pooled(record["evaluation"])
            assert record["metrics"]["perplexity"] == pytest.approx((2 * 1 + 3 * 10 + 4 * 100) / 111)
            assert record["judged"]["clients"] == 2
            assert record["judged"]["value"] == pytest.approx(record["evaluation"]["sensitivity"])

    asyncio.run(scenario())


def test_a_masked_round_has_the_sensitivity_of_all_sites_together(tmp_path: Path) -> None:
    """The site without a positive sample counts as one that has the metric, so that all three have it."""
    state = {"w": torch.zeros(300)}
    layout = Layout.of_state(state)
    text = run_file(target=3, minimum=3) + (
        '[codec]\nname = "integer"\n[secure_aggregation]\n'
        'evaluation = ["accuracy", "sensitivity"]\nmetrics = ["perplexity"]\n'
    )

    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(text, state)
            works = [
                LocalWork(
                    10,
                    4,
                    4,
                    {"perplexity": 2.0 + i},
                    one.metrics,
                    one.sample_count,
                    weights={"perplexity": 2**i},
                    evaluation_weights=one.weights,
                )
                for i, one in enumerate(map(evaluation_of, range(3)))
            ]
            devices = await it.devices(3, sample_count=0)
            parties = [SecureDevice(one, layout, work) for one, work in zip(devices, works, strict=True)]
            await asyncio.gather(*(one.take_part(change_of(layout, i)) for i, one in enumerate(parties)))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            require_pooled(record["evaluation"])
            perplexity = (2 * 1 + 3 * 2 + 4 * 4) / 7
            assert abs(record["metrics"]["perplexity"] - perplexity) < WITHIN

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ({"loss": 0}, "malformed-request"),
        ({"loss": 0.5}, "malformed-request"),
        ({"loss": (1 << 40) + 1}, "malformed-request"),
        ({"other": 3}, "malformed-request"),
        ({"loss": 1001}, "report-refused"),
    ],
)
def test_a_weight_that_no_metric_may_have_is_refused(tmp_path: Path, weights: dict[str, object], kind: str) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment = await device.work(layout)
            update = update_of(layout, torch.ones(layout.n_values))
            await device.upload(assignment["id"], update)
            refused = await device.report(assignment["id"], update, metrics={"loss": 0.5}, weights=weights)
            assert problem(refused) == kind
            accepted = await device.report(assignment["id"], update, metrics={"loss": 0.5}, weights={"loss": 1000})
            assert accepted.json()["outcome"] == "accepted", accepted.text

    asyncio.run(scenario())
