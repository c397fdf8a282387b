"""The demo's data, 1,797 handwritten digits that scikit-learn carries.

The test set is held out before anything is split, stratified by class; no client ever sees it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.labels import DirichletSplit, dirichlet_partition
from umbel.sim.data.partition.partition import Indices, class_counts

TEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DemoData:
    """`train`: the union of all shards; `shards`: one per client, the largest first; `test`: what the demo keeps.

    `class_counts`: samples by client and class, shape (clients, classes).
    """

    train: SampleSet
    shards: tuple[SampleSet, ...]
    test: SampleSet
    class_counts: Indices


def load_data(split: DirichletSplit, seed: int) -> DemoData:
    """Hold out the test set, then split the rest among the clients. The same seed gives the same data."""
    pixels, digits = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    labels = digits.astype(np.int64)
    train_index, test_index = train_test_split(
        np.arange(len(labels)),
        test_size=TEST_SHARE,
        stratify=labels,
        random_state=derive_seed(seed, "test set") % (1 << 32),
    )
    whole = SampleSet(torch.from_numpy(images), torch.from_numpy(labels))
    train = whole.take(np.sort(train_index))
    shards = dirichlet_partition(train.targets.numpy(), split, derive_seed(seed, "partition"))
    return DemoData(
        train=train,
        shards=tuple(train.take(shard) for shard in shards),
        test=whole.take(np.sort(test_index)),
        class_counts=class_counts(train.targets.numpy(), shards),
    )
