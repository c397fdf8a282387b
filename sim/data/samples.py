"""Samples with what a model should say of them, and how well one does."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from umbel.sim.data.partition.partition import Indices


@dataclass(frozen=True, slots=True)
class Samples:
    """`inputs`: (n, ...), of whatever type the model takes. `targets`: int64 (n,) or (n, ...), classes from 0 on."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Indices) -> "Samples":
        chosen = torch.from_numpy(indices)
        return Samples(self.inputs[chosen], self.targets[chosen])


@dataclass(frozen=True, slots=True)
class TrainAndTest:
    """Samples to train on, and samples that nobody trains on."""

    train: Samples
    test: Samples


@dataclass(frozen=True, slots=True)
class Score:
    """`accuracy`: share of right answers, 0 to 1; `loss`: mean cross-entropy in nats."""

    accuracy: float
    loss: float


def score(model: nn.Module, samples: Samples) -> Score:
    """How `model` does on held-out samples."""
    model.eval()
    with torch.no_grad():
        logits = model(samples.inputs)
    loss = nn.functional.cross_entropy(logits, samples.targets)
    return Score((logits.argmax(1) == samples.targets).double().mean().item(), loss.item())
