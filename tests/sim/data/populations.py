"""Populations for tests."""

import numpy as np

from umbel.sim.data.data_set import TrainAndTest
from umbel.sim.data.partition.partition import Partition, Transform
from umbel.sim.data.population import ShardedPopulation


def population(data: TrainAndTest, partition: Partition, transform: Transform | None = None) -> ShardedPopulation:
    """The clients that hold the training samples as `partition` deals them out; what is for testing is nobody's.

    Raises `ValueError` if a client has nothing to train on, or if `transform` cannot change such inputs.
    """
    made = ShardedPopulation(data.train, partition.shards, data.test, partition.holdouts, transform)
    made.data_of(np.zeros(1, dtype=np.int64))  # what cannot be transformed is refused now, not in the first round
    return made
