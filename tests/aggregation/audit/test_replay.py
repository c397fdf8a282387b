"""A replay makes a round's step of what the signed reports say."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.aggregation.audit.test_chain import PLAYED, played
from umbel.aggregation.algorithms.qfedavg import FairReport, FairTerms, step_factor
from umbel.aggregation.audit.bundle import AuditFailed, Participant, RoundEnded
from umbel.aggregation.audit.replay import Replay
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.training import TrainingPlan

TERMS = FairTerms(2.0, 4.0, 10.0)


def fair(said: dict[str, Any]) -> RoundEnded:
    """A committed round of q-FedAvg. `said`: the metrics in each report."""
    _, _, committed = played()
    training = TrainingPlan(learning_rate=0.1, algorithm="qfedavg", q=TERMS.q, loss_max=TERMS.loss_max)
    clients = tuple(_saying(one, said) for one in committed.clients)
    return replace(committed, training=training, clients=clients)


def _saying(one: Participant, said: dict[str, Any]) -> Participant:
    if one.report is None:
        return one
    work = {**json.loads(one.report.body), "metrics": said}
    return replace(one, report=replace(one.report, body=json.dumps(work)))


def factor(ended: RoundEnded) -> float:
    return Replay(ended, PLAYED.layout, AggregationSection()).step.factor


def test_the_factor_of_qfedavg_is_made_of_the_reports() -> None:
    ended = fair({"start_loss": 1.5, "change_norm": "0.25", "loss": 9.0})
    reports = [FairReport(one.weight or 0, 1.5, 0.25) for one in ended.accepted]
    assert len(reports) > 1
    assert factor(ended) == step_factor(reports, TERMS) != 1.0
    assert factor(fair({"start_loss": 3.0, "change_norm": 0.25})) != factor(ended)


@pytest.mark.parametrize(
    "said",
    [
        {"start_loss": 1.5},
        {"change_norm": 0.25},
        {"start_loss": -1.0, "change_norm": 0.25},
        {"start_loss": 1.5, "change_norm": float("inf")},
        {"start_loss": None, "change_norm": 0.25},
        {"start_loss": "much", "change_norm": 0.25},
    ],
)
def test_a_report_without_the_numbers_of_qfedavg_fails_in_words(said: dict[str, Any]) -> None:
    with pytest.raises(AuditFailed, match="does not say its start_loss and its change_norm"):
        factor(fair(said))
