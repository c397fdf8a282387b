"""Models for the tests of engines, as `module:function` names them; workers import them from here."""

import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

N_FEATURES, N_CLASSES = 12, 4


def linear() -> nn.Module:
    return nn.Linear(N_FEATURES, N_CLASSES)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(N_FEATURES, 16), nn.ReLU(), nn.Linear(16, N_CLASSES))


def with_dropout(rate: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(N_FEATURES, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, N_CLASSES))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(N_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, N_CLASSES))


def small_convolution() -> nn.Module:
    """Takes the features as an image of three by four, and keeps nothing beside its weights."""
    layers = (
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, N_CLASSES),
    )
    return nn.Sequential(*layers)


def convolutions() -> nn.Module:
    """Takes the features as an image of three by four."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, N_CLASSES),
    )


def convolutions_with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Dropout(0.5),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(96, N_CLASSES),
    )


class Tied(nn.Module):
    """Two layers of one matrix, a frozen bias, weights of three widths, and a counter."""

    n_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(N_FEATURES, N_FEATURES)
        self.second = nn.Linear(N_FEATURES, N_FEATURES, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(N_FEATURES, N_CLASSES)
        self.out.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(N_CLASSES, dtype=torch.float64))
        self.thin = nn.Parameter(torch.ones(N_CLASSES, dtype=torch.bfloat16))
        self.register_buffer("n_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.n_seen += len(inputs)
        logits: Tensor = self.out(functional.relu(self.second(functional.relu(self.first(inputs)))))
        return logits * self.scale.float() * self.thin.float()


def tied() -> nn.Module:
    return Tied()


class Replacing(nn.Module):
    """Puts a new tensor into a buffer's place at every step; and has another one that no state dict names."""

    mean: Tensor
    unnamed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(N_FEATURES, N_CLASSES)
        self.register_buffer("mean", torch.zeros(N_FEATURES))
        self.register_buffer("unnamed", torch.zeros(N_FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        self.unnamed += inputs.mean(0)
        logits: Tensor = self.out(inputs - self.mean - 0.1 * self.unnamed)
        return logits


def replacing() -> nn.Module:
    return Replacing()


class Shaken(nn.Module):
    """Draws from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(N_FEATURES, N_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.out(inputs * random.uniform(0.5, 1.5))
        return logits


def shaken() -> nn.Module:
    return Shaken()


class Counting(nn.Module):
    """Its counter runs away."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(N_FEATURES, N_CLASSES)
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.n += 1 << 24
        logits: Tensor = self.out(inputs)
        return logits


def counting() -> nn.Module:
    return Counting()


class Deadly(nn.Module):
    """Kills its process at the `after`-th forward pass of those that find the file `path`: once, or `always`."""

    def __init__(self, path: str, after: int, always: bool) -> None:
        super().__init__()
        self.out = nn.Linear(N_FEATURES, N_CLASSES)
        self._path, self._left, self._always = Path(path), after, always

    def forward(self, inputs: Tensor) -> Tensor:
        self._left -= self._path.exists()
        if self._left == 0:
            if not self._always:
                self._path.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        logits: Tensor = self.out(inputs)
        return logits


def deadly(path: str, after: int = 1, always: bool = False) -> nn.Module:
    return Deadly(path, after, always)


class Broken(nn.Module):
    """Cannot be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(N_FEATURES, N_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        raise ValueError(f"no such thing as {len(inputs)} samples")


def broken() -> nn.Module:
    return Broken()


class Slow(nn.Module):
    """So slow that a signal comes in mid-step."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(N_FEATURES, N_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.05)
        logits: Tensor = self.out(inputs)
        return logits


def slow() -> nn.Module:
    return Slow()
