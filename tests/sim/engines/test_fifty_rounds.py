"""Fifty rounds of real training, stacked, end where `nn.Module`, autograd and the mean loss end: within 1e-6 a weight.

Rounding could grow from round to round; that it does not is what lets a stacked run stand for a plain one.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.sim.engines.cohorts import start_of
from umbel.aggregation.plans.training import TrainingPlan
from umbel.sim.bench.simulate.workloads import workloads
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.choose import named_engine
from umbel.sim.engines.model import LOSSES
from umbel.sim.engines.stacked.lockstep import batches_in_pass
from umbel.sim.engines.stacked.stacked import StackedEngine
from umbel.sim.engines.work import CohortWork, Engine

ROUNDS, N_ASKED, EPOCHS_MAX = 50, 10, 8
DIGITS = next(one for one in workloads() if one.name == "A")
WAYS: dict[str, tuple[float, dict[str, Any]]] = {
    "plain": (0.0, {}),
    "momentum": (0.0, {"momentum": 0.9}),
    "proximal": (0.5, {}),
    "clipped": (0.0, {"clip_norm": 0.5}),
    "all": (0.1, {"momentum": 0.5, "weight_decay": 0.001, "clip_norm": 1.0}),
}


@lru_cache
def population() -> ShardedPopulation:
    """A hundred clients with 3 to 42 of the digits, so that batches are short and of unequal numbers."""
    return DIGITS.population()


@lru_cache
def stacked(by_hand: bool) -> Engine:
    return StackedEngine(DIGITS.recipe.make(), LOSSES[DIGITS.recipe.loss], by_hand=by_hand)


@lru_cache
def one_by_one(how: str) -> Tensor:
    return after_rounds(named_engine("sequential", DIGITS.recipe), how)


def after_rounds(engine: Engine, how: str) -> Tensor:
    """The model after fifty rounds of ten clients, each of whom makes one to eight passes, and part of the next."""
    mu, optimizer = WAYS[how]
    rate = 0.02 if optimizer.get("momentum", 0.0) > 0.5 else 0.05
    plan = TrainingPlan(batch_size=10, learning_rate=rate, proximal_mu=mu, **optimizer)
    draw, model = np.random.default_rng(3), start_of(DIGITS.recipe)
    for _ in range(ROUNDS):
        data = population().data_of(draw.choice(100, N_ASKED, replace=False))
        passes = draw.integers(1, EPOCHS_MAX + 1, N_ASKED)
        steps = passes * batches_in_pass(data.sizes, plan.batch_size) + draw.integers(0, 2, N_ASKED)
        seeds = draw.integers(1 << 63, size=N_ASKED, dtype=np.uint64)
        changes = torch.zeros(N_ASKED, len(model))
        for part in engine.train(model, CohortWork(data, seeds, steps, plan)):
            changes[torch.from_numpy(part.positions)] = part.values
        weights = torch.from_numpy(data.sizes).double()
        model = (model.double() + weights @ changes.double() / weights.sum()).float()
    return model


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "any module"])
@pytest.mark.parametrize(
    "how", ["all", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS if way != "all")]
)
def test_fifty_rounds_end_within_a_millionth(how: str, by_hand: bool) -> None:
    theirs = one_by_one(how)
    assert (theirs - start_of(DIGITS.recipe)).abs().max() > 0.1, "the model has learned something"
    apart = (after_rounds(stacked(by_hand), how) - theirs).abs().max()
    assert apart <= 1e-6
