"""A site's own metric with a name that umbel sets: the client fails with an error that says so."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from umbel.client import Client, Evaluation, LocalPlan, TrainResult, WeightedMean
from umbel.client.errors import TrainingFailed
from umbel.client.rounds.site_code import Trained, train_from
from umbel.client.training.shared_state import SharedState

PLAN = LocalPlan(steps=1)
MATRIX = [3, 1, 1, 3]


class Measuring(Client):
    """Returns these metrics and counts, of the training and of held-out data."""

    def __init__(self, trained: tuple[Any, Any] = ({}, {}), held_out: tuple[Any, Any] = ({}, {})) -> None:
        self.model, self.sample_count = nn.Linear(2, 1), 8
        self._trained, self._held_out = trained, held_out

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return TrainResult(8, 1, 1, *self._trained)

    def evaluate(self, model: nn.Module) -> Evaluation:
        return Evaluation(4, *self._held_out)

    def training_loss(self, model: nn.Module) -> float:
        return 0.5


def done(app: Client, plan: LocalPlan) -> Trained:
    shared = SharedState(app)
    return train_from(app, shared, {name: one.clone() for name, one in shared.shared().items()}, plan)


TRAINING: list[tuple[dict[str, float], dict[str, Any], dict[str, Any], str]] = [
    ({"gamma": 1.0}, {}, {"inexactness": True}, "'gamma', but the run measures it itself (inexactness"),
    ({"gamma": WeightedMean(math.nan, 0)}, {}, {"inexactness": True}, "'gamma'"),
    ({"start_loss": 1.0}, {}, {"algorithm": "qfedavg"}, "'start_loss', but the run measures it itself"),
    ({"change_norm": 1.0}, {}, {"algorithm": "qfedavg"}, "'change_norm'"),
]


@pytest.mark.parametrize(("metrics", "counts", "asked", "says"), TRAINING)
def test_a_metric_of_the_training_needs_another_name_in_runs_that_set_it(
    metrics: dict[str, float], counts: dict[str, Any], asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(TrainingFailed, match=r"train returned a metric named .* give it another name") as failed:
        done(Measuring((metrics, counts)), replace(PLAN, **asked))
    assert says in str(failed.value)
    assert done(Measuring((metrics, counts)), PLAN).result.sample_count == 8, "other runs take it"


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, evaluate=True)])
def test_a_metric_beside_counts_needs_another_name_than_their_figures(plan: LocalPlan) -> None:
    both: tuple[Any, Any] = {"confusion.accuracy": 0.75}, {"confusion": torch.tensor(MATRIX)}
    app = Measuring(held_out=both) if plan.evaluate else Measuring(both)
    with pytest.raises(
        TrainingFailed, match=r"'confusion\.accuracy', but umbel computes it from the counts 'confusion'"
    ):
        done(app, plan)
    assert done(Measuring(({"confusion.accuracy": 0.75}, {})), PLAN).result.metrics == {"confusion.accuracy": 0.75}


@pytest.mark.parametrize("named", [({"personal.size": 1.0, "size": 1.0}, {}), ({}, {"personal.seen": 4, "seen": 4})])
def test_a_metric_needs_another_name_than_those_of_the_sites_own_model(named: tuple[Any, Any]) -> None:
    plan = replace(PLAN, evaluate=True, evaluate_after=True)
    with pytest.raises(TrainingFailed, match=r"evaluate returned a metric named 'personal\.s.*evaluate_after"):
        done(Measuring(held_out=named), plan)
    alone = done(Measuring(held_out=named), replace(plan, evaluate_after=False)).evaluation
    assert alone is not None
    assert {*alone.metrics, *alone.counts} == {*named[0], *named[1]}
