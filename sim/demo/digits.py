"""The demo's data, 1,797 handwritten digits that scikit-learn carries, and its model, a small convolutional network.

The test set is held out before anything is split, stratified by class; no client ever sees it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.labels import DirichletSplit, dirichlet_partition
from umbel.sim.data.partition.partition import Indices, class_counts

N_CLASSES = 10


class DigitNet(nn.Module):
    """One 3x3 convolution of 32 channels, pooling, and two linear layers: 33,802 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 64)
        self.out = nn.Linear(64, N_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 8, 8) pixels -> (n, 10) logits."""
        centred = (images.unsqueeze(1) - 0.305) / 0.376  # the data set's mean and standard deviation
        features = nn.functional.max_pool2d(nn.functional.relu(self.conv(centred)), 2)
        logits: Tensor = self.out(nn.functional.relu(self.hidden(features.flatten(1))))
        return logits


def build_model(seed: int) -> DigitNet:
    """The model every client and every baseline starts from. Leaves torch's global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model") % (1 << 63))
        return DigitNet()


TEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DemoData:
    """`train`: the union of all shards; `shards`: one per client, the largest first; `test`: kept by the demo.

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
