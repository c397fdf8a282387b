"""The changes of all clients on the way of a training, and the benchmark on a small scale."""

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import nn

from umbel.sim.bench.sampling.bench import QUICK, SIZES, measure
from umbel.sim.bench.sampling.rounds import CIRCUMSTANCES
from umbel.sim.bench.sampling.training import MODEL, TRAINING, changes_on_the_way
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.data.sets.arrays import dataset
from umbel.sim.experiment.world import recipe_of

SHARDS = [np.arange(0, 4), np.arange(4, 7), np.arange(7, 16)]


def test_clients_change_the_model_by_their_gradient_and_a_round_moves_it_by_the_mean() -> None:
    """No client has more than a batch, so each takes one step with all of its samples."""
    numbers = np.random.default_rng(1)
    data = dataset(numbers.normal(size=(20, 3)), np.arange(20) % 2, test_share=0.2)
    population = ShardedPopulation(data.samples, [data.rows[shard] for shard in SHARDS], data.test)
    model = recipe_of(MODEL, data, 5).make()
    for found in changes_on_the_way(data, population, (1, 2), 5):
        changes = torch.stack([by_hand(model, population, client) for client in range(3)])
        assert found.sizes.tolist() == [4, 3, 9]
        assert found.products == pytest.approx((changes.double() @ changes.double().T).numpy(), rel=1e-4, abs=1e-9)
        mean = torch.tensor([4, 3, 9]) / 16 @ changes
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + mean, model.parameters())


def by_hand(model: nn.Module, population: ShardedPopulation, client: int) -> torch.Tensor:
    samples = population.data_of(np.array([client])).of(0)
    model.zero_grad()
    nn.functional.cross_entropy(model(samples.inputs), samples.targets).backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return -TRAINING.learning_rate * nn.utils.parameters_to_vector(gradients)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_benchmark_compares_both_draws_for_each_law_of_sizes_and_in_each_circumstance(tmp_path: Path) -> None:
    report = measure(quick=True, data=None, plot=tmp_path / "sampling.png")
    what = [row.what for row in report.rows]
    for name in (*SIZES, *(one.name for one in CIRCUMSTANCES)):
        assert sum(name in one and one.endswith(": error") for one in what) >= len(QUICK.cohorts)
    for row in report.rows:
        if row.against == "its formula":
            assert row.ratio == pytest.approx(1.0, abs=0.2)
    assert imread(tmp_path / "sampling.png").shape[2] == 4
