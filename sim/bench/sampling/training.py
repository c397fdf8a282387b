"""A training in which all clients take part, and their changes on the way: what rounds of fewer clients estimate."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.seeds import derive_seed
from umbel.sim.bench.sampling.errors import ClientChanges
from umbel.sim.bench.sampling.rounds import BATCH_SIZE
from umbel.sim.data.data_set import DataSet
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.engines.choose import stacked_engine
from umbel.sim.engines.model import start_vector
from umbel.sim.engines.work import CohortWork
from umbel.sim.experiment.world import recipe_of
from umbel.sim.federation.local_work import steps_asked
from umbel.sim.models import ModelSection

TRAINING = TrainingSection(local_epochs=1, batch_size=BATCH_SIZE, learning_rate=0.1)
MODEL = ModelSection("mlp")  # 64 hidden units


def changes_on_the_way(
    data: DataSet, population: ShardedPopulation, rounds: Sequence[int], seed: int
) -> Iterator[ClientChanges]:
    """The changes of all clients in each of these rounds, counted from 1. A round moves the model by their mean X."""
    recipe = recipe_of(MODEL, data, seed)
    model = recipe.make()
    engine = stacked_engine(recipe)
    start = start_vector(Layout.of_state(model.state_dict()), model.state_dict())
    everybody = np.arange(population.n_clients)
    sizes = population.sizes(everybody)
    shares = torch.from_numpy(sizes / sizes.sum())
    for number in range(1, max(rounds) + 1):
        plan = TRAINING.plan(number, max(rounds), population.n_clients)
        seeds = np.array([derive_seed(seed, "client", number, int(i)) for i in everybody], dtype=np.uint64)
        work = CohortWork(population.data_of(everybody), seeds, steps_asked(plan, sizes, 1.0), plan)
        changes = torch.empty(population.n_clients, len(start))
        for some in engine.train(start, work):
            changes[torch.from_numpy(some.positions)] = some.values
        if number in rounds:
            yield ClientChanges.of(sizes, changes)
        start = start + (shares @ changes.double()).to(start.dtype)
    engine.close()
