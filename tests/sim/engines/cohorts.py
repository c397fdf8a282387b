"""Cohorts for the tests of engines: few clients with few samples, of all the kinds that trip an engine up."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.training import TrainingPlan
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.population import CohortData, ShardedPopulation
from umbel.sim.engines.model import ModelRecipe, start_vector
from umbel.sim.engines.training import Losses
from umbel.sim.engines.work import Changes, CohortWork, Engine

MODELS = "tests.sim.engines.models"
N_FEATURES, N_CLASSES = 12, 4
STRUCTURED = {  # codecs whose updates carry a part of the model alone, within which clients train
    "mask": CodecPlan(Codec.MASK, key=7, parameters={"every": 3, "mode": "structured"}),
    "lowrank": CodecPlan(Codec.LOWRANK, key=7, parameters={"rank": 2, "mode": "structured"}),
}
Optimizing: TypeAlias = Mapping[str, Any]  # the optimizer's keys of [training]


def recipe(name: str, **arguments: object) -> ModelRecipe:
    return ModelRecipe(f"{MODELS}:{name}", arguments, seed=5)


def start_of(made_by: ModelRecipe) -> Tensor:
    """The model as it is made, which any process can tell."""
    state = made_by.make().state_dict()
    return start_vector(Layout.of_state(state), state)


def cohort_data(sizes: Sequence[int], seed: int = 1) -> CohortData:
    """Clients of these sizes, their samples here and there in one set that holds others' as well."""
    rng = np.random.default_rng(seed)
    n = sum(sizes) + 5
    inputs = torch.from_numpy(rng.normal(size=(n, N_FEATURES)).astype(np.float32))
    samples = SampleSet(inputs, torch.from_numpy(rng.integers(N_CLASSES, size=n)))
    shards = np.split(rng.permutation(n)[:-5], np.cumsum(sizes)[:-1])
    return ShardedPopulation(samples, shards, samples.take(np.arange(5))).data_of(np.arange(len(sizes)))


def work_of(
    sizes: Sequence[int],
    steps: Sequence[int],
    *,
    batch_size: int = 4,
    learning_rate: float = 0.1,
    proximal_mu: float = 0.0,
    optimizer: Optimizing | None = None,
    seed: int = 1,
    codec: CodecPlan | None = None,
) -> CohortWork:
    plan = TrainingPlan(
        batch_size=batch_size, learning_rate=learning_rate, proximal_mu=proximal_mu, **(optimizer or {})
    )
    seeds = np.random.default_rng(seed).integers(1 << 63, size=len(sizes), dtype=np.uint64)
    counts = np.array(steps, dtype=np.int64)
    codec = codec or CodecPlan()
    return CohortWork(cohort_data(sizes, seed), seeds, counts, plan, codec)


def all_changes(engine: Engine, start: Tensor, work: CohortWork) -> tuple[Tensor, Losses]:
    """What the engine makes of the cohort, by position: changes (n, n_values), and losses (n, 3)."""
    values = torch.full((len(work.data), len(start)), torch.nan)
    losses, seen = np.full((len(work.data), 3), np.nan), np.zeros(len(work.data), dtype=np.int64)
    for changes in engine.train(start, work):
        put(changes, values, losses)
        seen[changes.positions] += 1
    assert (seen == 1).all(), "each client is in one of the changes"
    return values, losses


def put(changes: Changes, values: Tensor, losses: Losses) -> None:
    values[torch.from_numpy(changes.positions)] = changes.values
    losses[changes.positions] = np.stack([changes.loss, changes.first_loss, changes.last_loss], axis=1)
