"""Labelled images, and how well a model reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from umbel.sim.partition import Indices


@dataclass(frozen=True, slots=True)
class Samples:
    """`images`: float32 (n, ...), pixels from 0 to 1. `labels`: int64 (n,), classes from 0 on."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices) -> "Samples":
        chosen = torch.from_numpy(indices)
        return Samples(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True, slots=True)
class Score:
    """`accuracy`: share of right answers, 0 to 1; `loss`: mean cross-entropy in nats."""

    accuracy: float
    loss: float


def score(model: nn.Module, samples: Samples) -> Score:
    """How `model` does on held-out samples."""
    model.eval()
    with torch.no_grad():
        logits = model(samples.images)
    loss = nn.functional.cross_entropy(logits, samples.labels)
    return Score((logits.argmax(1) == samples.labels).double().mean().item(), loss.item())
