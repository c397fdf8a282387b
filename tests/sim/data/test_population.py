"""A population hands out what its partition says, for a whole cohort at once."""

import numpy as np
import pytest
import torch

from tests.sim.data.populations import population
from umbel.sim.data.data_set import SampleSet, TrainAndTest
from umbel.sim.data.partition.partition import Partition

TRAIN = SampleSet(torch.arange(12.0)[:, None], torch.arange(12))
TEST = SampleSet(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
DATA = TrainAndTest(TRAIN, TEST)
SHARDS = (np.array([0, 5, 6]), np.array([1]), np.array([2, 11]))
HOLDOUTS = (np.array([7]), np.array([], dtype=np.int64), np.array([3, 4]))


def test_clients_hold_their_shards_in_the_order_they_are_asked_for() -> None:
    made = population(DATA, Partition(SHARDS))
    data = made.data_of(np.array([2, 0]))
    assert made.n_clients == 3
    assert made.test is TEST
    assert made.sizes(np.array([2, 0])).tolist() == data.sizes.tolist() == [2, 3]
    assert [data.of(i).targets.tolist() for i in range(2)] == [[2, 11], [0, 5, 6]]
    assert data.samples is TRAIN, "nothing is copied where nothing is changed"
    assert made.holdout_of(np.array([0])) is None


def test_clients_hold_back_what_the_partition_says_even_nothing() -> None:
    held = population(DATA, Partition(SHARDS, HOLDOUTS)).holdout_of(np.array([1, 2, 0]))
    assert held is not None
    assert [held.of(i).targets.tolist() for i in range(3)] == [[], [3, 4], [7]]


def test_a_client_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 clients hold no sample"):
        population(DATA, Partition((np.array([1]), np.array([], dtype=np.int64))))
