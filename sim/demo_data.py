"""The demo's data, 1,797 handwritten digits that scikit-learn carries, and how well a model reads them.

The test set is held out before anything is split, stratified by class; no client ever sees it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from umbel.aggregation.seeds import derive_seed
from umbel.sim.partition import DirichletSplit, Indices, class_counts, dirichlet_partition

TEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Samples:
    """`images`: float32 (n, 8, 8), pixels from 0 to 1. `labels`: int64 (n,), digits 0 to 9."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices) -> "Samples":
        chosen = torch.from_numpy(indices)
        return Samples(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True, slots=True)
class DemoData:
    """`train`: the union of all shards; `shards`: one per client, the largest first; `test`: what the demo keeps.

    `class_counts`: samples by client and class, shape (clients, classes).
    """

    train: Samples
    shards: tuple[Samples, ...]
    test: Samples
    class_counts: Indices


@dataclass(frozen=True, slots=True)
class Score:
    """`accuracy`: share of right answers, 0 to 1; `loss`: mean cross-entropy in nats."""

    accuracy: float
    loss: float


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
    whole = Samples(torch.from_numpy(images), torch.from_numpy(labels))
    train = whole.take(np.sort(train_index))
    shards = dirichlet_partition(train.labels.numpy(), split, derive_seed(seed, "partition"))
    return DemoData(
        train=train,
        shards=tuple(train.take(shard) for shard in shards),
        test=whole.take(np.sort(test_index)),
        class_counts=class_counts(train.labels.numpy(), shards),
    )


def score(model: nn.Module, samples: Samples) -> Score:
    """How `model` does on held-out samples."""
    model.eval()
    with torch.no_grad():
        logits = model(samples.images)
    loss = nn.functional.cross_entropy(logits, samples.labels)
    return Score((logits.argmax(1) == samples.labels).double().mean().item(), loss.item())
