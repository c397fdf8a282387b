"""What `umbel bench simulate` measures: four federations, from a few small clients to many, and one of a large model.

*A*: digits, an MLP 64-64-10, 100 clients by Dirichlet(0.3) of uneven sizes, 10 a round, 5 epochs. *B*: the CNN of
McMahan et al. 2017, 10 clients of 600 samples a round, 1 epoch. *C*: logistic regression on Synthetic(1, 1) with its
long tail of sizes, 1000 clients a round. *Cs*: the same with 20 samples a client. Batches of 10. Data are in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from umbel.aggregation.plans.training import TrainingPlan, TrainingSection
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.load import digits
from umbel.sim.data.partition.labels import DirichletSplit, dirichlet_partition
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.data.sets.synthetic import SyntheticLaw, SyntheticPopulation
from umbel.sim.engines.model import ModelRecipe

_SEED = 1
_IMAGE = (1, 28, 28)


@dataclass(frozen=True, slots=True)
class Workload:
    """`n_asked`: clients of a round; `rounds`: timed ones, and with `--quick`."""

    name: str
    words: str
    model_words: str
    recipe: ModelRecipe
    population: Callable[[], ShardedPopulation]
    n_asked: int
    training: TrainingSection
    rounds: int
    rounds_quick: int

    def run_file(self, n_rounds: int) -> RunFile:
        """A run without over-selection, so that both sides do the same work."""
        rounds = RoundsSection(n_rounds, self.n_asked, over_selection=1.0, window_s=86_400.0)
        return RunFile(f"bench-{self.name.lower()}", rounds, _SEED, self.training)

    @property
    def plan(self) -> TrainingPlan:
        return self.training.plan(1, self.rounds, self.n_asked)


def workloads() -> tuple[Workload, ...]:
    """All four."""
    made = "umbel.sim.models"
    logistic = ModelRecipe(f"{made}:perceptron", {"input_shape": [60], "hidden": [], "n_classes": 10})
    of_a = ModelRecipe(f"{made}:perceptron", {"input_shape": [64], "hidden": [64], "n_classes": 10})
    cnn = ModelRecipe(f"{made}:convolutional", {"input_shape": list(_IMAGE), "n_classes": 10})
    return (
        Workload(
            "A",
            "digits, MLP 64-64-10, 10 of 100 clients, E=5",
            "MLP 64-64-10, digits",
            of_a,
            _digits,
            10,
            TrainingSection(local_epochs=5, batch_size=10, learning_rate=0.05),
            40,
            10,
        ),
        Workload(
            "C",
            "Synthetic(1,1), long tail, logistic, 1000 clients",
            "logistic, long tail",
            logistic,
            lambda: _synthetic(None),
            1000,
            TrainingSection(local_epochs=1, batch_size=10, learning_rate=0.01),
            7,
            2,
        ),
        Workload(
            "Cs",
            "Synthetic(1,1), 20 samples a client, logistic, 1000 clients",
            "logistic, 20 samples each",
            logistic,
            lambda: _synthetic(20),
            1000,
            TrainingSection(local_epochs=1, batch_size=10, learning_rate=0.01),
            15,
            5,
        ),
        Workload(
            "B",
            "CNN of 1,663,370 weights, 10 x 600 samples",
            "CNN of 1.7 million weights",
            cnn,
            _images,
            10,
            TrainingSection(local_epochs=1, batch_size=10, learning_rate=0.01),
            3,
            1,
        ),
    )


def _digits() -> ShardedPopulation:
    data = digits(0.2, _SEED)
    split = DirichletSplit(100, 0.3, size_alpha=2.0, min_samples=3)
    shards = [data.rows[shard] for shard in dirichlet_partition(data.labels, split, _SEED)]
    flat = SampleSet(data.samples.inputs.reshape(len(data.samples), -1), data.samples.targets)
    return ShardedPopulation(flat, shards, SampleSet(data.test.inputs.reshape(len(data.test), -1), data.test.targets))


def _synthetic(samples: int | None) -> ShardedPopulation:
    made = SyntheticPopulation(SyntheticLaw(n_clients=1000, samples=samples), _SEED)
    data = made.data_of(np.arange(made.n_clients))
    return ShardedPopulation(data.samples, np.split(data.rows, data.starts[1:-1]), made.test)


def _images() -> ShardedPopulation:
    """Random images: the time depends only on their shape."""
    draw = torch.Generator().manual_seed(_SEED)
    n = 10 * 600
    samples = SampleSet(torch.randn(n, *_IMAGE, generator=draw), torch.randint(10, (n,), generator=draw))
    return ShardedPopulation(samples, np.split(np.arange(n), 10), samples.take(np.arange(10)))
